"""The largest round of a configuration: it runs on real engines, and its reckoned bytes bound what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from family_checkpoints import write_family
from pipelines import configuration

from parallel.groups import open_groups
from trtrun.attention.backend import HostAttention
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.core.nouns import RoundPlan
from trtrun.engine.graphs import decode_graphs as graphs
from trtrun.engine.graphs.decode_graphs import MixedGraphs
from trtrun.errors import ConfigError
from trtrun.kvcache.sizing import SlotMemory, StoreSize, count_kv_blocks
from trtrun.memory import largest_round
from trtrun.memory.largest_round import TrialRun, chained_round, largest_rounds, small_round
from trtrun.memory.memory_requirements import round_shape
from trtrun.start import engine_maker, startup
from trtrun.start.job_spec import JobSpec
from trtrun.start.kernels_ahead import KernelsAhead
from trtrun.start.startup import RankStartup

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
SETTINGS: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 40, "max_seq_len": 64},
    "kv_cache": {"max_tokens": 128},
}


def start(config: RuntimeConfig) -> RankStartup:
    """A job of one process with its weights loaded."""
    topology = make_topology(config)
    loaded = RankStartup(JobSpec(config), 0, open_groups(None, topology, torch.device("cpu")))
    loaded.load(lambda done, total: None)
    return loaded


@pytest.mark.parametrize(
    ("family", "device", "given", "expected"),
    [
        ("qwen3_moe", "cuda:0", None, 8192),
        ("qwen3_moe", "cuda:0", 512, 512),
        ("qwen3_moe", "cpu:0", None, 2048),
        ("olmo2", "cuda:0", None, 2048),
    ],
)
def test_mixtures_on_gpus_may_read_more_of_a_prompt_at_once(
    tmp_path: Path, family: str, device: str, given: int | None, expected: int
) -> None:
    sections = {"scheduler": {"max_num_tokens": given}, "speculation": {"method": "none"}}
    config = configuration(write_family(tmp_path, family), None, devices=((), (device,)), **sections)
    shape = round_shape(config, JobSpec(config).models)
    assert (shape.max_tokens, config.max_num_tokens) == (expected, min(expected, 2048))


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "chunks"), [(4, 40, [40]), (4, 150, [32, 59, 59]), (1, 9, [9]), (2, 9999, [59, 59])]
)
def test_the_largest_rounds_have_all_the_rows_and_tokens_there_may_be(
    tmp_path: Path, max_rows: int, max_tokens: int, chunks: list[int]
) -> None:
    target = make_checkpoint(tmp_path / "target")
    settings = {**SETTINGS, "scheduler": {"max_batch_size": max_rows, "max_num_tokens": max_tokens, "max_seq_len": 64}}
    config = configuration(target, make_draft(tmp_path / "draft", target, 1), **settings)
    shape = round_shape(config, JobSpec(config).models)
    mixed, padded, short, alone, few, scored = largest_rounds(shape)
    assert [(chunk.row, chunk.start, chunk.length) for chunk in scored.prefill] == [
        (chunk.row, chunk.start, chunk.length) for chunk in mixed.prefill
    ]
    assert [chunk.scored.length for chunk in scored.prefill if chunk.scored] == [
        chunk.length - 1 for chunk in mixed.prefill
    ]
    assert sorted(chunk.length for chunk in mixed.prefill) == chunks
    assert [chunk.length for chunk in short.prefill] == [min(max_tokens, 59)]
    assert all(sorted(plan.sampled_rows) == list(range(max_rows)) for plan in (mixed, padded, short, alone))
    lengths = [min(chunk.length, 17) for chunk in padded.prefill]
    assert len(lengths) == min(max_rows, -(-max_tokens // 17)) and lengths[:-1] == [17] * (len(lengths) - 1)
    assert sum(chunk.length for chunk in padded.prefill) == min(max_tokens, 59 + 17 * (max_rows - 1))
    assert alone.prefill == () and set(alone.draft_lens.tolist()) == {4}
    assert len(few.decode_rows) == max_rows - 1 and [chunk.length for chunk in few.prefill] == [1]
    assert alone.max_context <= 64 and small_round(shape).max_context < alone.max_context


@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("method", ["none", "draft_target", "ngram"])
def test_a_trial_run_runs_on_a_store_of_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_logits: bool, with_graphs: bool, method: str
) -> None:
    """What a GPU measures runs here on the CPU; graphs are played by running the captured work again."""
    if with_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    target = make_checkpoint(tmp_path / "target", seed=1)
    with_draft = method == "draft_target"
    draft = make_draft(tmp_path / "draft", target, 1) if with_draft else None
    speculation = {"method": method, "use_logits": use_logits and with_draft, "draft_len": 3}
    config = configuration(target, draft, speculation=speculation, **SETTINGS)
    loaded = start(config)
    shape = round_shape(config, JobSpec(config).models)
    trial = loaded._made.trial_run(shape)
    for plan in (*largest_rounds(shape), chained_round(shape), small_round(shape)):
        trial.play(plan)
    assert len(trial.engines) == 1 + with_draft
    assert all(engine._store.num_blocks == 1 for engine in trial.engines.values())
    assert (trial.num_graphs > 0) == with_graphs
    assert trial.num_graphs <= graphs.MOST_GRAPHS
    trial.close()
    assert trial.num_graphs == 0
    layers = [len(engine.model._layers) for engine in loaded._engines.values()]
    loaded._made.play_all()  # as where kernels are looked for: all of a start, with few layers
    assert [len(engine.model._layers) for engine in loaded._engines.values()] == layers
    worker, report = loaded.finish(StoreSize(9))
    assert worker.target is not None and report.kv_tokens == 8 * 16
    assert report.working_bytes > 0


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "max_seq_len", "draft_len", "tokens"),
    [
        (4, 2048, 600, 3, 4 * 4 + 512),
        (4, 700, 600, 3, 4 * 4 + 512),  # a graph of as many tokens as a round has, not more
        (4, 2048, 9000, 3, 4 * 4 + 512),  # of contexts that have one
        (40, 2048, 600, 8, 32 * 8 + 512),  # fewer rows and queries than there may be
        (3, 2048, 64, 3, 3 * 4 + 256),
    ],
)
def test_a_trial_run_runs_the_largest_graph_of_rows_and_prompts_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_rows: int,
    max_tokens: int,
    max_seq_len: int,
    draft_len: int,
    tokens: int,
) -> None:
    """With all it computes in: the pool of graphs is memory beside what forwards without a graph take."""
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    monkeypatch.setattr(HostAttention, "tile", 64)
    target = make_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=1, max_position_embeddings=9000)
    config = configuration(
        target,
        None,
        speculation={"method": "ngram", "draft_len": draft_len},
        scheduler={"max_batch_size": max_rows, "max_num_tokens": max_tokens, "max_seq_len": max_seq_len},
        kv_cache={"max_tokens": 9600},
    )
    shape, loaded = round_shape(config, JobSpec(config).models), start(config)
    trial = loaded._made.trial_run(shape)
    played: list[Any] = []
    run = MixedGraphs.run
    monkeypatch.setattr(MixedGraphs, "run", lambda *taken: (played.append(taken[1]), run(*taken))[-1])
    trial.verify_beside_prompts()
    assert [one.tokens for one in played] == [tokens]
    shapes = trial.engines["target"].graph_shapes
    assert shapes is not None and len(shapes.mixed.all) > 1
    assert trial.most_graphs == graphs.MOST_GRAPHS + len(shapes.mixed.all)
    trial.close()


class Counters:
    """A GPU's counters of memory, moved on by each round that is played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.reserved, self.peak = free, 0, 0
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 1 << 40))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)

    def take(self, reserved: int, elsewhere: int) -> None:
        """Let torch's allocator and others take bytes."""
        self.reserved += reserved
        self.peak = max(self.peak, self.reserved)
        self.free -= reserved + elsewhere


def test_a_measured_round_counts_the_allocator_the_libraries_and_graphs_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 MiB: seven large rounds take 30 each, and 5 each beside the allocator; a small one 2, and 1 a graph."""
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    settings = {**SETTINGS, "kv_cache": {"max_tokens": None, "block_size": 4, "free_memory_fraction": 1.0}}
    target = make_checkpoint(tmp_path / "target", seed=1)
    loaded = start(configuration(target, None, **settings))
    counters = Counters(monkeypatch, 1000 * MIB)
    play, played = TrialRun.play, []

    def counted(trial: TrialRun, plan: RoundPlan) -> None:
        before = trial.num_graphs
        play(trial, plan)
        is_small = len(played) == 7
        played.append(plan)
        captured = trial.num_graphs - before
        counters.take(2 * MIB if is_small else 30 * MIB, captured * MIB if is_small else 5 * MIB)

    monkeypatch.setattr(TrialRun, "play", counted)
    blocks = loaded._count_beside(None).blocks
    assert len(played) == 8
    for_graphs = graphs.MOST_GRAPHS * (MIB + largest_round._GRAPH_TENSORS_BYTES)
    expected = (210 + 2 + 35) * MIB + for_graphs
    assert loaded._working_bytes == expected
    demand = loaded._parts.demand()
    most_useful = 4 * -(-65 // 4)
    assert blocks == min((1000 * MIB - expected) // demand.bytes_per_block, most_useful + 1)

    def fail(trial: TrialRun, plan: RoundPlan) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrialRun, "play", fail)
    with pytest.raises(ConfigError, match=r"the largest round does not fit into the .* MiB free beside the weights"):
        loaded._count_beside(None)


def test_what_cannot_work_is_refused_with_all_the_bytes() -> None:
    demand = SlotMemory(shard_bytes=1000 * MIB, bytes_per_block=MIB, working_bytes=500 * MIB)

    def count(free: int, max_tokens: int | None = None) -> int:
        return count_kv_blocks(
            free * MIB,
            demand,
            fraction=0.5,
            block_size=16,
            max_tokens=max_tokens,
            most_useful=10**6,
            where="target rank 1 (cuda:0)",
        ).blocks

    assert count(1700) == 100, "half of what is left beside weights and a round"
    with pytest.raises(ConfigError, match=r"round needs 500 MiB but 400 MiB of 1.37 GiB are free .* \(1000 MiB\): low"):
        count(1400)
    with pytest.raises(ConfigError, match=r"weights \(1000 MiB\) and the largest round \(500 MiB\): at most 1584 tok"):
        count(1600, max_tokens=16 * 200)
    with pytest.raises(ConfigError, match=r"weights \(1000 MiB\) and the largest round \(500 MiB\) does not hold a"):
        count(1501)


def test_a_cpu_reckons_a_round_and_refuses_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a round are taken off before KV gets its share; without them the store would have taken them."""
    target = make_checkpoint(tmp_path / "target")
    settings = {"scheduler": {"max_batch_size": 64, "max_num_tokens": 512}, "kv_cache": {"max_tokens": 1024}}
    config = configuration(target, None, **settings)
    loaded = start(config)
    demand = loaded._parts.demand()
    assert demand.working_bytes > 10 * demand.shard_bytes > 0, "a tiny model in large batches"
    free = demand.shard_bytes + demand.working_bytes // 2
    monkeypatch.setattr(startup, "free_bytes_of_slot", lambda device, host_slots: free)
    with pytest.raises(ConfigError, match=r"the largest round needs .* lower scheduler.max_batch_size"):
        start(config)


PROGRAM = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(sys.argv[1]) / "tests" / "unit" / "memory"))
from test_largest_round import JobSpec, configuration, largest_rounds, round_shape, start

def peak():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024

torch.set_num_threads(1)
config = configuration(
    Path(sys.argv[2]),
    Path(sys.argv[3]),
    speculation={"draft_len": 4, "use_logits": sys.argv[4] == "True"},
    scheduler={"max_batch_size": int(sys.argv[5]), "max_num_tokens": 512, "max_seq_len": 512},
    kv_cache={"max_tokens": 512},
)
loaded = start(config)
trial = loaded._made.trial_run(round_shape(config, JobSpec(config).models))
before = peak()
for plan in largest_rounds(round_shape(config, JobSpec(config).models)):
    trial.play(plan)
print(json.dumps([loaded._parts.demand().working_bytes, peak() - before]))
"""


@pytest.mark.parametrize("known", [None, 7])
def test_rounds_that_do_not_fit_while_kernels_are_looked_for_are_left_to_those_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int | None
) -> None:
    """A GPU is played: the questions to the other ranks, and the memory. What an earlier start knew is taken over."""
    asked: list[bool] = []
    looked: list[str] = []

    def agree(loaded: RankStartup, is_so: bool) -> bool:
        asked.append(is_so)
        return is_so

    def no_room(*_: object) -> None:
        looked.append("looked")
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RankStartup, "_agree", agree)
    monkeypatch.setattr(RankStartup, "_count_beside", lambda loaded, working_bytes: (5, working_bytes))
    monkeypatch.setattr(KernelsAhead, "compile", no_room)
    monkeypatch.setattr(KernelsAhead, "close", lambda ahead: looked.append("closed"))
    monkeypatch.setattr(KernelsAhead, "working_bytes", property(lambda ahead: known, lambda *_: None), raising=False)
    config = configuration(make_checkpoint(tmp_path / "target", seed=1), None, **SETTINGS)
    topology = make_topology(config)
    loading = RankStartup(JobSpec(config), 0, open_groups(None, topology, torch.device("cpu")))
    assert loading.load(lambda done, total: None) == (5, known)  # type: ignore[comparison-overlap]
    assert asked == [True, True, known is not None]
    assert looked == (["closed"] if known else ["looked", "closed"])


@pytest.mark.parametrize(
    ("num_like", "others_agree", "expected"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_first_runs_are_short_where_the_layers_of_all_ranks_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_like: int, others_agree: bool, expected: bool
) -> None:
    """A GPU is played, and a rank that has others to agree with. Layers of the target are alike, those of the draft or
    not."""
    asked: list[bool] = []

    def agree(loaded: RankStartup, is_so: bool) -> bool:
        asked.append(is_so)
        for engine in loaded._engines.values():
            if len(asked) == 2:  # as ranks of a group begin
                assert engine.model.shortens_first_runs == engine.model.has_like_layers
                engine.model.shortens_first_runs = False
        return is_so and (others_agree or len(asked) != 2)

    monkeypatch.setattr(RankStartup, "_agree", agree)
    monkeypatch.setattr(RankStartup, "_count_beside", lambda loaded, working_bytes: 5)
    monkeypatch.setattr(KernelsAhead, "compile", lambda ahead, play: None)
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": num_like}
    target = make_checkpoint(tmp_path / "target", "Qwen2ForCausalLM", num_hidden_layers=2, seed=1)
    draft = make_checkpoint(tmp_path / "draft", "Qwen2ForCausalLM", num_hidden_layers=2, seed=2, **windows)
    config = configuration(target, draft, **SETTINGS)
    topology = make_topology(config)
    loading = RankStartup(JobSpec(config), 0, open_groups(None, topology, torch.device("cpu")))
    assert loading.load(lambda done, total: None) == 5
    assert asked == [True, num_like == 2, False]
    models = [engine.model for engine in loading._engines.values()]
    assert [model.shortens_first_runs for model in models] == [expected] * 2


@pytest.mark.parametrize("use_logits", [False, True])
def test_the_reckoned_bytes_are_no_less_than_a_round_takes(tmp_path: Path, use_logits: bool) -> None:
    """In a process of its own, since a peak never falls."""
    target = make_checkpoint(tmp_path / "target", vocab_size=30_000, max_position_embeddings=1024)
    draft = make_draft(tmp_path / "draft", target, 1)
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (ROOT, target, draft, use_logits, 32))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reckoned, taken = json.loads(done.stdout.splitlines()[-1])
    print(f"reckoned {reckoned / MIB:.0f} MiB, taken {taken / MIB:.0f} MiB")
    assert taken <= reckoned
    logits = 32 * 5 * 30_000 * 4
    assert taken > 2 * logits, "the measure sees logits and what sampling makes of them"


@pytest.mark.parametrize(
    ("taken", "num_graphs", "expected"),
    [(6 << 20, 3, 2 << 20), (40 << 30, 2, 64 << 20), (-(1 << 30), 2, 0), (1 << 30, 0, 0)],
)
def test_what_another_process_takes_is_not_counted_for_each_graph(taken: int, num_graphs: int, expected: int) -> None:
    """Free memory is the whole GPU's."""
    tensors = largest_round.graph_bytes(0, 1)
    assert 0 < tensors < MIB
    assert largest_round.graph_bytes(taken, num_graphs) == expected + tensors
