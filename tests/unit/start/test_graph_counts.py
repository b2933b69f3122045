"""The graphs that a start captures, counted before it, are those that it captures.

Captures are played on the CPU, as in tests/unit/engine/test_graphs.py, and so are the choices of sampled rows, which
only GPUs have kernels for.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assistant_heads import Assistant
from checkpoints import make_checkpoint, make_draft
from eagle3_heads import make_head, write_head
from eagle_heads import make_eagle_head, write_eagle_head
from family_checkpoints import write_family
from pipelines import configuration

from parallel.groups import Groups, open_groups
from parallel.transports.solo import SoloCommunicator
from trtrun.attention.backend import HostAttention
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.engine import forwards
from trtrun.engine.graphs import graph_shapes
from trtrun.engine.runner import Engine
from trtrun.kvcache.sizing import StoreSize
from trtrun.kvcache.tile_widths import prompt_width
from trtrun.loading.loading import load_model
from trtrun.memory.largest_round import SilentExchange, chained_round, largest_rounds, small_round
from trtrun.memory.memory_requirements import round_shape
from trtrun.memory.spaces import guess_space, guess_steps
from trtrun.sampling.distributions import _KINDS, NUM_KINDS, KeyedRanks
from trtrun.sampling.filters import likeliest
from trtrun.speculation.drafters import DRAFTERS, DrafterContext
from trtrun.start import engine_maker
from trtrun.start.engine_maker import EngineMaker, LoadedEngine, count_graphs
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import RankStartup

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": {"method": "none"}, "scheduler": {"max_batch_size": 7}},
    "draft": {"speculation": {"draft_len": 3}, "scheduler": {"max_batch_size": 5}},
    "paced": {"speculation": {"draft_len": 9, "pacing": "measured"}, "scheduler": {"max_batch_size": 17}},
    "parallel": {"speculation": {"draft_len": 9, "pacing": "measured"}, "scheduler": {"max_batch_size": 17}},
    "parallel, one token": {"speculation": {"draft_len": 1}, "scheduler": {"max_batch_size": 2}},
    "probabilities": {"speculation": {"draft_len": 3, "use_logits": True}, "scheduler": {"max_batch_size": 3}},
    "lookup": {"speculation": {"method": "ngram", "draft_len": 5}, "scheduler": {"max_batch_size": 9}},
    "trees": {"speculation": {"method": "ngram", "draft_len": 4, "max_paths": 3}, "scheduler": {"max_batch_size": 3}},
    "paced trees": {
        "speculation": {"method": "ngram", "draft_len": 8, "max_paths": 2, "pacing": "measured"},
        "scheduler": {"max_batch_size": 2},
    },
    "few tokens": {"scheduler": {"max_batch_size": 4, "max_num_tokens": 20}},
    "short": {"scheduler": {"max_batch_size": 2, "max_seq_len": 12}},
    "blocks": {"kv_cache": {"block_size": 3}, "scheduler": {"max_batch_size": 2}},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, whose work runs once, prompts in tiles, and kernels that choose."""

    def kinds(cls: Any, sampling: Any, rows: Any, lengths: torch.Tensor, stream: Any) -> list[KeyedRanks]:
        return [KeyedRanks(sampling, torch.tensor(list(rows)), lengths, stream, cuts) for cuts in _KINDS]

    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: lambda: None)
    monkeypatch.setattr(HostAttention, "tile", 64)
    monkeypatch.setattr(graph_shapes, "MOST_PROMPT_TOKENS", 128)  # fewer graphs of prompts
    monkeypatch.setattr(forwards, "MOST_PROMPT_TOKENS", 128)
    monkeypatch.setattr(KeyedRanks, "kinds", classmethod(kinds))
    monkeypatch.setattr(KeyedRanks, "rank", lambda self, logits, step, count, *parameters: likeliest(logits, count))


def make_target(folder: Path, context: int) -> Path:
    """Of one layer, as none of it matters here."""
    shape = {"num_hidden_layers": 1, "max_position_embeddings": context}
    return make_checkpoint(folder / "target", "LlamaForCausalLM", seed=1, **shape)


def count(config: RuntimeConfig, context: int, role: str) -> int:
    """As of an engine whose prompts are cut into tiles of 64 queries."""
    models = replace(JobSpec(config).models, context=context)
    width = prompt_width(64, models.of_role(role).num_heads, models.of_role(role).num_kv_heads)
    return count_graphs(config, models, role, width, NUM_KINDS)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", CASES)
def test_a_start_captures_as_many_graphs_as_were_counted(tmp_path: Path, name: str) -> None:
    target = make_checkpoint(
        tmp_path / "target", "LlamaForCausalLM", seed=1, num_hidden_layers=1, max_position_embeddings=600
    )
    settings = CASES[name]
    with_draft = "method" not in settings.get("speculation", {})
    draft = make_draft(tmp_path / "draft", target, 1) if with_draft else None
    if draft is not None and name.startswith("parallel"):
        name_mask_token(draft)
    config = configuration(target, draft, **settings)
    topology = make_topology(config)
    startup = RankStartup(JobSpec(config), 0, open_groups(None, topology, CPU))
    startup.load(lambda done, total: None)
    engines = startup._made.engines(StoreSize(9))
    startup._made.warm_up(startup._worker_factory(engines, startup._made.head_rows(engines), 9).make_worker(), engines)
    captured = {role: engine.num_graphs for role, engine in engines.items()}
    context = config.scheduler.max_seq_len or 600
    assert captured == {role: count(config, context, role) for role in engines}
    assert len(captured) == 1 + with_draft and min(captured.values()) > 2


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("method", "tree"),
    [
        *itertools.product(("eagle", "eagle3"), ({}, {"eagle_topk": 2}, {"eagle_choices": [[0], [1]]})),
        ("gemma4_mtp", {}),
    ],
)
def test_graphs_of_heads_that_attend_are_counted_with_the_targets(
    tmp_path: Path, method: str, tree: dict[str, Any]
) -> None:
    """Nodes of trees are fed through one, and chosen without."""
    shape = {"num_hidden_layers": 7, "max_position_embeddings": 600}
    target = tmp_path / "target"
    if method == "gemma4_mtp":
        write_family(target, "gemma4_small", max_position_embeddings=600)
        heads = Assistant(target).write(tmp_path / "assistant")
    else:
        make_checkpoint(target, "LlamaForCausalLM", seed=1, **shape)
    if method == "eagle":
        heads = write_eagle_head(tmp_path / "head", make_eagle_head(target), "reference", target)
    elif method == "eagle3":
        heads = write_head(tmp_path / "head", make_head(target), "reference", target)
    settings: dict[str, Any] = {"speculation": {"method": method, **tree}, "scheduler": {"max_batch_size": 5}}
    config = configuration(target, None, heads=heads, **settings)
    topology = make_topology(config)
    startup = RankStartup(JobSpec(config), 0, open_groups(None, topology, CPU))
    startup.load(lambda done, total: None)
    engines = startup._made.engines(StoreSize(9, 9))
    worker = startup._worker_factory(engines, startup._made.head_rows(engines), 9).make_worker()
    startup._made.warm_up(worker, engines)
    assert worker.drafter is not None and worker.drafter.num_graphs > 5
    assert engines["target"].num_graphs + worker.drafter.num_graphs == count(config, 600, "target")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("tree", [{}, {"eagle_topk": 2}])
def test_graphs_of_a_head_on_a_rank_of_its_own_are_counted(tmp_path: Path, tree: dict[str, Any]) -> None:
    shape = {"num_hidden_layers": 7, "max_position_embeddings": 600}
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1, **shape)
    config = configuration(
        target,
        None,
        heads=write_head(tmp_path / "head", make_head(target), "reference", target),
        heads_apart=True,
        devices=(["cpu:0"], ["cpu:1"]),
        speculation={"method": "eagle3", **tree},
        scheduler={"max_batch_size": 5},
    )
    own = SoloCommunicator()
    startup = RankStartup(JobSpec(config), 1, Groups(own, None, None))
    startup.load(lambda done, total: None)
    fed = startup._made.head_rows({})
    silent = SilentExchange(CPU, 199, verifies=False)
    worker = startup._worker_factory({}, fed, 9).make_worker(silent)
    startup._made.warm_up(worker, {})
    assert worker.drafter is not None
    assert worker.drafter.num_graphs == count_graphs(config, startup._models, "draft", None, NUM_KINDS) > 5
    shape = round_shape(config, startup._models)
    trial = startup._made.trial_run(shape)
    for plan in (*largest_rounds(shape), chained_round(shape), small_round(shape)):
        trial.play(plan)


def name_mask_token(draft: Path) -> None:
    """All tokens of its drafts come from one forward."""
    values = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**values, "pard_token": 7}))


def draft_rank(config: RuntimeConfig, context: int) -> tuple[EngineMaker, dict[str, Engine], Any]:
    """A draft rank with a device of its own: its maker, its engines and what it warms up beside them."""
    assert config.draft is not None
    spec = JobSpec(config)
    assert spec.models.context == context
    model, report = load_model(config.draft.model, spec.model_of("draft"), SoloCommunicator(), CPU, torch.float32)
    loaded, vocab_size = {"draft": LoadedEngine(model, report, SoloCommunicator())}, model.config.vocab_size
    maker = EngineMaker(spec, CPU, loaded, None, False, lambda *_: None)  # type: ignore[arg-type,return-value]
    engines = maker.engines(StoreSize(9))
    context = DrafterContext(
        config.speculation,
        engines["draft"],
        None,
        vocab_size,
        guess_space(config, 9),
        guess_steps(config),
        spec.models.mask_token,
    )
    return maker, engines, SimpleNamespace(drafter=DRAFTERS.get(config.speculation.method)(context))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("ahead", "use_logits", "in_parallel"),
    [("on", False, False), ("on", True, False), ("off", False, False), ("on", False, True), ("off", True, True)],
)
def test_graphs_of_draft_ranks_of_their_own_are_counted(
    tmp_path: Path, ahead: str, use_logits: bool, in_parallel: bool
) -> None:
    """They rank candidates, and have rows for guesses."""
    target = make_checkpoint(
        tmp_path / "target", "LlamaForCausalLM", seed=1, num_hidden_layers=1, max_position_embeddings=1100
    )
    draft = make_draft(tmp_path / "draft", target, 1)
    if in_parallel:
        name_mask_token(draft)
    config = configuration(
        target,
        draft,
        devices=(["cpu:0"], ["cpu:1"]),
        speculation={"draft_len": 2, "ahead": ahead, "use_logits": use_logits},
        scheduler={"max_batch_size": 3},
    )
    maker, engines, worker = draft_rank(config, 1100)
    maker.warm_up(worker, engines)
    assert engines["draft"].num_graphs == count(config, 1100, "draft") > 10


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_start_keeps_all_the_graphs_that_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of many tokens in one forward, ahead of verdicts, has more than are kept otherwise."""
    monkeypatch.setattr(engine_maker, "MOST_GRAPHS", 20)
    target = make_target(tmp_path, 600)
    draft = make_draft(tmp_path / "draft", target, 1)
    name_mask_token(draft)
    config = configuration(
        target, draft, devices=(["cpu:0"], ["cpu:1"]), speculation={"draft_len": 5}, scheduler={"max_batch_size": 3}
    )
    maker, engines, worker = draft_rank(config, 600)
    maker.warm_up(worker, engines)
    assert engines["draft"].num_graphs == engines["draft"].most_graphs == count(config, 600, "draft") > 20


@pytest.mark.usefixtures("as_on_a_gpu")
def test_contexts_beyond_sixteen_thousand_tokens_have_more_graphs(tmp_path: Path) -> None:
    target = make_checkpoint(
        tmp_path / "target", "LlamaForCausalLM", seed=1, num_hidden_layers=1, max_position_embeddings=17000
    )
    numbers = []
    for context in (16000, 17000):
        scheduler, cache = {"max_batch_size": 2, "max_seq_len": context}, {"max_tokens": 20000}
        config = configuration(target, None, speculation={"method": "none"}, scheduler=scheduler, kv_cache=cache)
        topology = make_topology(config)
        startup = RankStartup(JobSpec(config), 0, open_groups(None, topology, CPU))
        startup.load(lambda done, total: None)
        engines = startup._made.engines(StoreSize(9))
        startup._made.warm_up(
            startup._worker_factory(engines, startup._made.head_rows(engines), 9).make_worker(), engines
        )
        numbers.append(engines["target"].num_graphs)
        assert numbers[-1] == count(config, context, "target")
    assert numbers[0] < numbers[1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_start_that_requests_wait_for_leaves_graphs_to_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all kernels are compiled: those would take seconds each."""
    held = list[dict[str, Engine]]()
    make = EngineMaker.engines

    def engines(maker: EngineMaker, size: StoreSize, capture: Any = None) -> dict[str, Engine]:
        held.append(make(maker, size, capture))
        return held[-1]

    monkeypatch.setattr(EngineMaker, "engines", engines)
    target = make_target(tmp_path, 600)
    config = configuration(target, make_draft(tmp_path / "draft", target, 1), scheduler={"max_batch_size": 4})
    made = {}
    for is_awaited, has_kernels in ((False, True), (True, False), (True, True)):
        spec = JobSpec(config, is_awaited=is_awaited)
        startup = RankStartup(spec, 0, open_groups(None, spec.topology, CPU))
        startup.load(lambda done, total: None)
        startup._has_kernels = has_kernels
        startup.finish(StoreSize(9))
        made[is_awaited, has_kernels] = {role: engine.num_graphs for role, engine in held[-1].items()}
    whole = {role: count(config, 600, role) for role in ("target", "draft")}
    assert made[False, True] == made[True, False] == whole
    few = made[True, True]
    assert 0 < few["target"] <= 4 and 0 < few["draft"] < whole["draft"] / 2, "the largest, whose memory others find"
