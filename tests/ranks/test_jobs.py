"""Whole jobs over real ranks: every placement gives what transformers and a single process give, and idles quietly.

Each test opens an LLM on all ranks of the running job, as a user's program would: rank 0 goes on with it, the others
serve inside the constructor until it is closed. test_job_failures.py has the jobs that end badly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pytest
from checkpoints import make_checkpoint
from mpi4py import MPI
from pipelines import (
    Reference,
    configuration,
    interrupt_call,
    noisy_copy,
    prompt_of,
    run_alone,
    tokens_of,
    useless_draft,
)

import trtrun.llm_engine
from parallel import control
from parallel.groups import Groups
from parallel.transports import mpi as transports_mpi
from parallel.waiting import Waiter
from trtrun import LLM, SamplingParams, open_llm
from trtrun.config import RuntimeConfig
from trtrun.core import RoundPlan
from trtrun.errors import PlacementError, TrtrunError
from trtrun.outputs import RequestOutput
from trtrun.roles import job
from trtrun.roles.draft_worker import DraftWorker
from trtrun.roles.launched_round import DecidedRound, LaunchedRound
from trtrun.roles.target_worker import TargetWorker
from trtrun.roles.worker import Worker
from trtrun.topology import make_topology
from trtrun.wire.reports import ReportArrays

pytestmark = pytest.mark.mpi

T = TypeVar("T")
Devices = tuple[tuple[str, ...], tuple[str, ...]]
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def place(draft: str, target: str) -> Devices:
    """`place("a", "bc")`: the draft on slot a, the target on slots b and c."""
    draft_slots, target_slots = (tuple(f"cpu:{'abcd'.index(name)}" for name in names) for names in (draft, target))
    return draft_slots, target_slots


BY_WORLD_SIZE: dict[int, dict[str, Devices]] = {
    1: {"one slot": place("a", "a"), "one slot, no draft": place("", "a")},
    3: {"1+1": place("a", "b"), "a+ab": place("a", "ab"), "ab+ba": place("ab", "ba"), "no draft, 2": place("", "ab")},
    4: {"1+2": place("a", "bc"), "2+1": place("ab", "c"), "ab+bc": place("ab", "bc")},
    5: {"2+2": place("ab", "cd")},
}
HERE = BY_WORLD_SIZE.get(SIZE, {})
LENGTHS = (1, 9, 70, 24, 3, 41)
COUNT = 24


def sampling(drafts: Sequence[int | None] = ()) -> list[SamplingParams]:
    """Greedy and sampled rows by turns, each with a draft_len of its own where `drafts` has one for it."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
        {"stop_token_ids": (7, 8, 9)},
        {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.3, "n": 2},
    ]
    return [
        SamplingParams(max_tokens=COUNT, seed=index, draft_len=most, **kind)
        for index, (kind, most) in enumerate(zip_longest(kinds, drafts))
    ]


def prompts() -> list[list[int]]:
    return [prompt_of(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target`, `noisy` and `useless` for all ranks; the last has one KV head, which ranks must share."""
    folder = None
    if MPI.COMM_WORLD.rank == 0:
        folder = tmp_path_factory.mktemp("jobs")
        target = make_checkpoint(folder / "target", seed=1, num_hidden_layers=2, num_shards=1)
        noisy_copy(folder / "noisy", target, 0.05)
        useless_draft(folder / "useless")
    path: Path = MPI.COMM_WORLD.bcast(folder)
    return path


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[tuple[int, ...]]:
    """transformers' greedy texts, at rank 0."""
    if MPI.COMM_WORLD.rank != 0:
        return []
    reference = Reference(folder / "target")
    return [reference.greedy(prompt, COUNT) for prompt in prompts()]


def alone(config: RuntimeConfig, use: Callable[[LLM], T]) -> T:
    """What `use` gives when this process is the whole job, whatever world it runs in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trtrun.llm_engine, "open_job", lambda config, _: job._open_solo(config, make_topology(config), None)
        )
        with LLM(config=config) as llm:
            return use(llm)


def run_job(config: RuntimeConfig, use: Callable[[LLM], T]) -> T | None:
    """Run `use` at rank 0 of a job over all ranks; returns what it returns there, None elsewhere."""
    with open_llm(config) as llm:
        assert (llm is not None) == (MPI.COMM_WORLD.rank == 0)
        if llm is None:
            return None
        result = use(llm)
        llm.check_idle()
        return result


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of the tokens of an output's first completion."""
    return [entry.logprob for entry in output.completions[0].logprobs or []]


def job_configuration(folder: Path, devices: Devices, draft: str = "noisy", **sections: Any) -> RuntimeConfig:
    sections = {
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
        "kv_cache": {"max_tokens": 1024, "block_size": 8},
        "speculation": {"draft_len": 3},
    } | sections
    return configuration(folder / "target", folder / draft if devices[0] else None, devices=devices, **sections)


@pytest.fixture(scope="module")
def in_one_process(folder: Path) -> Callable[[bool], list[RequestOutput]]:
    """Return ask(has_draft) -> what one process writes with `sampling()`; the one who asks waits for it once."""

    @cache
    def ask(has_draft: bool) -> list[RequestOutput]:
        devices = (("cpu:0",) if has_draft else (), ("cpu:0",))
        return alone(job_configuration(folder, devices), lambda llm: llm.generate(prompts(), sampling()))

    return ask


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("name", list(HERE))
def test_every_placement_writes_what_transformers_and_one_process_write(
    folder: Path,
    greedy: list[tuple[int, ...]],
    in_one_process: Callable[[bool], list[RequestOutput]],
    name: str,
    plans_ahead: int,
) -> None:
    devices = HERE[name]
    scheduler = {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": plans_ahead}

    def use(llm: LLM) -> list[Any]:
        texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        llm.set_speculation(False)
        plain = tokens_of(llm.generate(prompts(), sampling()))
        llm.set_speculation(True)
        # One row decodes plainly beside the others, some have short drafts, and some bring drafts of their own.
        asked = sampling((None, 0, 3, 1, None, 2) if devices[0] else ())
        for row, right in ((0, COUNT), (2, COUNT // 2), (3, COUNT), (4, 1)):
            asked[row] = replace(asked[row], draft_token_ids=(*plain[row][0][:right], 5, 5, 5, 5))
        outputs = llm.generate(prompts(), asked)
        if devices[0]:
            counted = [output.completions[0].statistics for output in outputs]
            assert counted[1].num_draft_tokens == 0 and counted[0].num_rounds < 12
        return [texts, outputs, plain, llm.statistics(), llm.report]

    found = run_job(job_configuration(folder, devices, scheduler=scheduler), use)
    if found is None:
        return
    texts, outputs, plain, statistics, report = found
    assert [tokens for (tokens,) in texts] == greedy
    expected = in_one_process(bool(devices[0]))
    sampled = tokens_of(outputs)
    assert sampled == plain == tokens_of(expected)
    logprobs = logprobs_of(outputs[2])
    assert len(logprobs) == len(sampled[2][0])
    assert logprobs == pytest.approx(logprobs_of(expected[2]), abs=1e-4)
    assert statistics["num_rounds"] > 0
    assert (statistics["num_accepted_draft_tokens"] > 20) == bool(devices[0])
    workers = [rank for rank in report.ranks if rank.shard_bytes]
    assert len(workers) == max(1, SIZE - 1)
    assert all(rank.bytes_read == rank.shard_bytes for rank in workers if len(devices[1]) == 1 == len(devices[0]))


@pytest.mark.parametrize("name", [name for name in HERE if SIZE > 1 and not {*HERE[name][0]}.isdisjoint(HERE[name][1])])
def test_a_round_is_launched_behind_one_whose_verdict_is_not_here(
    folder: Path, greedy: list[tuple[int, ...]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: the target leader takes the next plan while the device works, and reports in order."""
    launched: list[int] = []
    most, tries = [0], [0]
    launch, finish = Worker.launch_round, DecidedRound.finish

    def log_launch(worker: Worker, plan: RoundPlan) -> LaunchedRound:
        launched.append(plan.round_index)
        most[0] = max(most[0], len(launched))
        return launch(worker, plan)

    def log_finish(decided: DecidedRound) -> ReportArrays:
        report = finish(decided)
        assert launched.pop(0) == report.round_index
        tries[0] = 0
        return report

    monkeypatch.setattr(Worker, "launch_round", log_launch)
    monkeypatch.setattr(DecidedRound, "finish", log_finish)

    def is_done(decided: DecidedRound) -> bool:
        """Once the next plan is here, or where none comes after some tries of the wait."""
        tries[0] += 1
        return len(launched) > 1 or tries[0] > 40

    monkeypatch.setattr(DecidedRound, "is_done", is_done)
    found = run_job(
        job_configuration(folder, HERE[name]),
        lambda llm: [tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))) for _ in range(2)],
    )
    if MPI.COMM_WORLD.rank == make_topology(job_configuration(folder, HERE[name])).target_leader:
        assert most[0] == 2, "rounds of which no verdict was read"
    if found is not None:
        assert [tokens for (tokens,) in found[0]] == [tokens for (tokens,) in found[1]] == greedy


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("plans_ahead", [pytest.param(0, marks=pytest.mark.long), 1])
def test_prompt_lookup_on_all_target_ranks_writes_what_one_process_writes(
    tmp_path_factory: pytest.TempPathFactory, plans_ahead: int
) -> None:
    """The target alone over as many ranks as there are, with rows that are preempted and prefilled in chunks."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        sizes = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "intermediate_size": 96}
        path = make_checkpoint(tmp_path_factory.mktemp("lookup") / "target", seed=1, num_hidden_layers=2, **sizes)
    target: Path = MPI.COMM_WORLD.bcast(path)
    sections: dict[str, Any] = {
        "speculation": {"method": "ngram", "draft_len": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 104, "block_size": 8},
    }

    def use(llm: LLM) -> list[Any]:
        texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        outputs = llm.generate(prompts(), sampling())
        repeating = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT, frequency_penalty=-2.0)))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        preempted = sum(one.statistics.num_preemptions for output in outputs for one in output.completions)
        llm.check_idle()
        return [texts, tokens_of(outputs), repeating, accepted, preempted]

    slots = tuple(f"cpu:{index}" for index in range(SIZE - 1))
    found = run_job(configuration(target, None, devices=((), slots), **sections), use)
    if found is None:
        return
    reference = Reference(target)
    assert [tokens for (tokens,) in found[0]] == [reference.greedy(prompt, COUNT) for prompt in prompts()]
    assert found[:4] == alone(configuration(target, None, **sections), use)[:4]
    assert found[3] > 40 and found[4] > 0


@pytest.mark.parametrize("name", [name for name in HERE if HERE[name][0]])
def test_a_quantized_draft_shared_over_ranks_loses_nothing(
    folder: Path, greedy: list[tuple[int, ...]], name: str
) -> None:
    def use(llm: LLM) -> Any:
        return tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))), llm.statistics()

    found = run_job(job_configuration(folder, HERE[name], quantization="int8"), use)
    if found is not None:
        texts, statistics = found
        assert [tokens for (tokens,) in texts] == greedy
        assert statistics["num_accepted_draft_tokens"] > 20


@pytest.mark.parametrize("name", [name for name in HERE if name in ("a+ab", "1+2")])
def test_a_rounded_target_shared_over_ranks_writes_its_plain_texts(folder: Path, name: str) -> None:
    def use(llm: LLM) -> Any:
        speculative = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        llm.set_speculation(False)
        return speculative, accepted, run_alone(llm, prompts(), [SamplingParams(max_tokens=COUNT)] * len(LENGTHS))

    found = run_job(job_configuration(folder, HERE[name], quantization="fp8", target_quantization="fp8"), use)
    if found is not None:
        speculative, accepted, plain = found
        assert speculative == plain
        assert accepted > 20


WITH_PROBS: dict[str, Any] = {
    "speculation": {"draft_len": 3, "use_logits": True},
    "kv_cache": {"max_tokens": 104, "block_size": 8},
}


def use_with_probs(llm: LLM) -> list[Any]:
    """Greedy texts, sampled ones, and how often rows were preempted."""
    texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
    outputs = llm.generate(prompts(), sampling())
    preempted = sum(output.completions[0].statistics.num_preemptions for output in outputs)
    return [texts, tokens_of(outputs), preempted]


@pytest.fixture(scope="module")
def in_one_process_with_probs(folder: Path) -> Callable[[str], list[Any]]:
    """Return ask(draft) -> what `use_with_probs` gives in one process; the one who asks waits for it once."""

    @cache
    def ask(draft: str) -> list[Any]:
        return alone(job_configuration(folder, (("cpu:0",), ("cpu:0",)), draft, **WITH_PROBS), use_with_probs)

    return ask


@pytest.mark.parametrize("name", [name for name in HERE if HERE[name][0]])
@pytest.mark.parametrize("draft", ["noisy", pytest.param("useless", marks=pytest.mark.long)])
def test_draft_probabilities_cross_ranks_and_give_what_one_process_gives(
    folder: Path,
    greedy: list[tuple[int, ...]],
    in_one_process_with_probs: Callable[[str], list[Any]],
    name: str,
    draft: str,
) -> None:
    """The useless draft has one KV head, which both ranks of its group hold; rows are preempted on the way."""
    found = run_job(job_configuration(folder, HERE[name], draft, **WITH_PROBS), use_with_probs)
    if found is None:
        return
    assert [tokens for (tokens,) in found[0]] == greedy
    assert found == in_one_process_with_probs(draft)
    assert found[2] > 0


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("name", list(HERE)[:1])
def test_a_waiting_job_is_quiet(folder: Path, name: str) -> None:
    """Ranks that wait for the next call use little of their cores: well under a third of the time."""
    world = MPI.COMM_WORLD
    processes = world.allgather(os.getpid())

    def cpu_seconds(process: int) -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def use(llm: LLM) -> list[float]:
        llm.generate(prompts()[:2], SamplingParams(max_tokens=8))
        before, started = [cpu_seconds(process) for process in processes], time.monotonic()
        time.sleep(1.5)  # the span that is measured, no synchronisation
        span = time.monotonic() - started
        return [(cpu_seconds(process) - start) / span for process, start in zip(processes, before, strict=True)]

    shares = run_job(job_configuration(folder, HERE[name]), use)
    if shares is not None:
        print(f"shares of a core while idle: {[round(share, 3) for share in shares]}")
        assert max(shares[1:]) < 0.3, shares


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("has_cores", [False, True])
@pytest.mark.parametrize("name", list(HERE)[:1])
def test_ranks_spin_only_on_cores_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_cores: bool
) -> None:
    allowed: list[bool] = []

    class Spy(Waiter):
        def __init__(self, may_spin: bool) -> None:
            allowed.append(may_spin)
            super().__init__(may_spin)

    for module in (control, transports_mpi):
        monkeypatch.setattr(module, "Waiter", Spy)
    monkeypatch.setattr(job, "has_free_cores", lambda *_: has_cores)
    found = run_job(job_configuration(folder, HERE[name]), lambda llm: llm.generate(prompts()[:1])[0])
    # One for plans or reports; at workers one for each peer of the link.
    peers = 0 if MPI.COMM_WORLD.rank == 0 else MPI.COMM_WORLD.size - 1
    assert allowed[0] == has_cores and set(allowed) == {has_cores} and len(allowed) >= 1 + peers
    assert (found is not None) == (MPI.COMM_WORLD.rank == 0)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("name", list(HERE)[:1])
def test_workers_close_their_groups_at_the_end_behind_their_graphs(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for owner in (Worker, DraftWorker, TargetWorker, Groups):

        def close(self: Any, owner: Any = owner, original: Any = owner.close) -> None:
            closed.append(owner.__name__)
            original(self)

        monkeypatch.setattr(owner, "close", close)
    run_job(job_configuration(folder, HERE[name]), lambda llm: llm.generate(prompts()[:1]))
    ranks = [[], *[["DraftWorker"]] * len(HERE[name][0]), *[["TargetWorker"]] * len(HERE[name][1])]
    worker = ranks[MPI.COMM_WORLD.rank]
    assert closed == [*worker, *["Groups"][: len(worker)]]


@pytest.mark.mpi(min_size=2)
def test_a_world_of_another_size_is_refused_with_both_counts(folder: Path) -> None:
    """On every rank, before anything is loaded, so that none is left waiting."""
    for size, devices in ((3, place("a", "b")), (4, place("a", "bc")), (5, place("ab", "cd")), (1, place("a", "a"))):
        if size == SIZE:
            continue
        with pytest.raises(PlacementError) as caught:
            LLM(config=job_configuration(folder, devices))
        message = str(caught.value)
        assert f"{size} rank" in message and f"{SIZE} were started" in message
        assert "\n" not in message


@pytest.mark.mpi(min_size=2)
def test_a_model_that_cannot_be_loaded_is_said_once_and_lets_all_ranks_go(folder: Path, tmp_path: Path) -> None:
    """Only the draft's weights are missing: the draft's ranks alone see it, and all ends well everywhere."""
    if not any(devices[0] for devices in HERE.values()):
        return
    name = next(name for name in HERE if HERE[name][0])
    path = MPI.COMM_WORLD.bcast(tmp_path)
    if MPI.COMM_WORLD.rank == 0:
        noisy_copy(path / "draft", folder / "target", 0.01)
        (path / "draft" / "model.safetensors").write_bytes(b"broken")
    MPI.COMM_WORLD.Barrier()
    config = configuration(folder / "target", path / "draft", devices=HERE[name])
    if MPI.COMM_WORLD.rank == 0:
        with pytest.raises(Exception, match=r"draft.*model\.safetensors") as caught:
            LLM(config=config)
        assert "\n" not in str(caught.value)
    else:
        assert LLM.open(config) is None


@pytest.mark.mpi(min_size=3)
def test_an_llm_on_a_worker_rank_says_how_a_program_is_written(folder: Path) -> None:
    if not HERE:
        return
    config = job_configuration(folder, next(iter(HERE.values())))
    if MPI.COMM_WORLD.rank == 0:
        with LLM(config=config) as llm:
            assert llm.generate([prompt_of(5)], SamplingParams(max_tokens=3))[0].error is None
    else:
        with pytest.raises(TrtrunError, match=r"trtrun\.open_llm\(config\)"):
            LLM(config=config)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_an_interrupt_under_mpi_leaves_the_engine_usable(folder: Path, plans_ahead: int) -> None:
    """Ctrl-C while plans are made and sent, while rank 0 waits for a report, and while a result is committed."""
    if not HERE:
        return
    config = job_configuration(folder, next(iter(HERE.values())), scheduler={"plans_ahead": plans_ahead})

    def use(llm: LLM) -> None:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        expected = tokens_of(llm.generate([prompt_of(9), prompt_of(30)], sampling))
        for owner, name in (
            (llm.engine.scheduler, "schedule"),
            (llm.engine.orchestrator._ranks, "publish"),
            (llm.engine.orchestrator._ranks, "collect"),
            (llm.engine.scheduler, "commit"),
        ):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                interrupt_call(patch, owner, name, number=3)
                llm.generate([prompt_of(9), prompt_of(30)], sampling)
            llm.check_idle()
            assert tokens_of(llm.generate([prompt_of(9), prompt_of(30)], sampling)) == expected

    run_job(config, use)
