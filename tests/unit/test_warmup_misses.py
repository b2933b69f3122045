"""Graphs and kernels that are made while somebody waits: counted where they are made, and told with the rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from pipelines import make_llm, prompt_of

from trtrun import LLM, SamplingParams
from trtrun.core.nouns import Request
from trtrun.engine.graphs import graph_cache as capture
from trtrun.engine.graphs.graph_cache import CudaCapture
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.drafter import Drafter
from trtrun.warmup_misses import WarmupMisses, WarmupMissWatch, count_capture, count_compilation
from trtrun.wire.reports import RoundReport, RoundTimes


def test_a_watch_tells_what_was_counted_since_it_was_asked_last() -> None:
    count_capture()
    watch = WarmupMissWatch()
    assert watch.take() == WarmupMisses(captures=0, compilations=0), "what was before is none of its own"
    count_capture()
    count_compilation()
    count_compilation()
    other = WarmupMissWatch()
    assert watch.take() == WarmupMisses(captures=1, compilations=2)
    assert watch.take() == WarmupMisses()
    count_capture()
    assert watch.take() == other.take() == WarmupMisses(captures=1), "each of two is told"


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_counts_once_it_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The device is played: it is captured as often on any."""
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(capture, "capturing", lambda *_: nullcontext())

    def work() -> None:
        if fails:
            raise ZeroDivisionError

    make_graph, watch = CudaCapture(torch.device("cuda")), WarmupMissWatch()
    for _ in range(2):
        with suppress(ZeroDivisionError):
            replay = make_graph(work)
            replay()
            replay()
    assert watch.take() == WarmupMisses(captures=0 if fails else 2)


class TwoLeaders:
    """Ranks of which the draft's leader tells of a round before the target's does."""

    draft_is_lost = False
    stepping = nullcontext

    def __init__(self, draft: WarmupMisses, target: WarmupMisses) -> None:
        self._told = draft, target
        self._reports: deque[RoundReport] = deque()

    def publish(self, plan: Any) -> None:
        draft, target = (RoundTimes(warmup_misses=uses) for uses in self._told)
        self._reports.append(RoundReport(plan.round_index, draft, False, [], [], [], []))
        self._reports.append(RoundReport(plan.round_index, target, True, [1], [0], [[5]], []))

    def collect(self) -> RoundReport:
        return self._reports.popleft()


def test_what_both_leaders_made_is_added_up_over_rounds() -> None:
    ranks = TwoLeaders(WarmupMisses(captures=1, compilations=10), WarmupMisses(captures=2, compilations=30))
    scheduler = Scheduler(SchedulerLimits(1, 64, 100, None, 3, 16, 16))
    orchestrator = Orchestrator(scheduler, cast(EngineRanks, ranks))
    scheduler.add(Request(1, (1, 2), SamplingParams(seed=1, max_tokens=20)))
    for _ in range(3):
        orchestrator.step()
    totals = orchestrator.totals.as_dict()
    assert (totals["num_rounds"], totals["num_captures"], totals["num_compilations"]) == (3, 9, 120)


@pytest.fixture
def make_one(tmp_path: Path) -> Callable[[], LLM]:
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    return lambda: make_llm(target, draft)


def test_the_statistics_of_a_run_have_what_its_rounds_made_and_not_what_the_start_did(
    make_one: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = Drafter.warm_up

    def warm_up_and_capture(drafter: Drafter, *arguments: Any) -> None:
        warm_up(drafter, *arguments)
        count_capture()

    monkeypatch.setattr(Drafter, "warm_up", warm_up_and_capture)
    watch = WarmupMissWatch()
    with make_one() as llm:
        assert watch.take().captures == 1

        def made() -> tuple[int, int]:
            llm.generate([prompt_of(9)], SamplingParams(max_tokens=6))
            totals = llm.statistics()
            return totals["num_captures"], totals["num_compilations"]

        assert made() == (0, 0)
        count_capture()
        count_compilation()
        count_compilation()
        assert made() == made() == (1, 2)
        llm.reset_statistics()
        assert made() == (0, 0)
