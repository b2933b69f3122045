"""A trace of rounds over real ranks: every rank's spans, by one clock, so that causes come before what they cause."""

from __future__ import annotations

import itertools
import os
import time
from functools import partial
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import configuration, noisy_copy, prompt_of
from traces import assert_rounds_follow, assert_whole, spans_named

from trtrun import SamplingParams, open_llm
from trtrun.api.llm import LLM
from trtrun.core.nouns import RoundPlan
from trtrun.roles import message_exchange, served_rank
from trtrun.timing.spans import ENGINES, ORCHESTRATOR, RankSpans
from trtrun.timing.tracing import PhaseTracer

SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
PLACES = {
    3: {"1+1": (("cpu:0",), ("cpu:1",)), "a+ab": (("cpu:0",), ("cpu:0", "cpu:1"))},
    4: {"1+2": (("cpu:0",), ("cpu:1", "cpu:2"))},
}
HERE = PLACES.get(SIZE, {})
WAYS = [
    (name, clocks, plans_ahead)
    for name in HERE
    for clocks, plans_ahead in itertools.product(("one clock", "clocks apart"), (0, 1))
    if name == "1+1" or (clocks, plans_ahead) == ("clocks apart", 1)
]
"""Where ranks have two parts, or there are more of them, the hardest."""
APART = 1000.0
"""Seconds between the clocks of one rank and the next, where they are set apart."""

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target` and `draft` for all ranks."""
    folder = None
    if MPI.COMM_WORLD.rank == 0:
        folder = tmp_path_factory.mktemp("traces")
        noisy_copy(folder / "draft", make_checkpoint(folder / "target", seed=1, num_hidden_layers=2), 0.05)
    return from_rank_0(folder)


def traced_run(llm: LLM) -> tuple[list[RankSpans], list[RoundPlan]]:
    """A trace of the second of three calls, and the plans of its rounds."""
    orchestrator, sampling = llm.engine.orchestrator, SamplingParams(max_tokens=20)
    llm.generate([prompt_of(4)], sampling)
    plans: list[RoundPlan] = []
    schedule = orchestrator.scheduler.schedule

    def remember(draft_len: int | None, **named: bool) -> RoundPlan | None:
        plan = schedule(draft_len, **named)
        if plan is not None:
            plans.append(plan)
        return plan

    orchestrator.scheduler.schedule = remember
    llm.reset_statistics()
    orchestrator.start_trace(most_rounds=1000)
    llm.generate([prompt_of(9), prompt_of(20)], sampling)
    assert llm.statistics()["num_rounds"] == len(plans)
    trace, traced = orchestrator.take_trace(), list(plans)
    llm.generate([prompt_of(5)], sampling)  # nothing stays behind that would be in its way
    return trace, traced


@pytest.mark.parametrize(("name", "clocks", "plans_ahead"), WAYS)
def test_spans_of_all_ranks_are_whole_and_causes_come_first(
    folder: Path, name: str, clocks: str, plans_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = MPI.COMM_WORLD.rank
    monkeypatch.setattr(message_exchange, "SHORTEST_PATIENCE", 60.0)  # on a busy machine, too, a draft comes in time
    if clocks == "clocks apart" and rank:
        apart = partial(PhaseTracer, clock=lambda: time.perf_counter() + APART * rank)
        monkeypatch.setattr(served_rank, "PhaseTracer", apart)
    config = configuration(
        folder / "target", folder / "draft", devices=HERE[name], scheduler={"plans_ahead": plans_ahead}
    )
    with open_llm(config) as llm:
        if llm is None:
            return
        trace, plans = traced_run(llm)
    assert [(part.rank, part.part) for part in trace] == [
        (0, ORCHESTRATOR), *((worker, ENGINES) for worker in range(1, SIZE))
    ]  # fmt: skip
    rounds = [plan.round_index for plan in plans]
    slack = 1e-9 if clocks == "one clock" else 1e-6  # of floats
    for part in trace:
        assert_whole(part.spans, rounds, slack)
        assert part.num_dropped_rounds == 0
        expected = 0.0 if clocks == "one clock" else -APART * part.rank
        assert part.clock.seconds == pytest.approx(expected, abs=part.clock.error + 1e-6)
        if part.part == ENGINES:
            assert_rounds_follow(part.spans)
    assert_causes_come_first(trace, plans, config.draft is not None and HERE[name][0][0] == HERE[name][1][0])


def assert_causes_come_first(trace: list[RankSpans], plans: list[RoundPlan], is_shared: bool) -> None:
    """The draft's rank is 1; the target's leader is that one too where both share it, else rank 2."""
    leader = 1 if is_shared else 2
    planning, waiting = ({s.round_index: s for s in trace[0].spans if s.name == n} for n in ("planning", "waiting"))
    drafting, verifying = spans_named(trace, 1, "drafting"), spans_named(trace, leader, "verifying")
    # Where clocks were compared they may be off; on one clock causes come first, and that is all.
    off = {part.rank: part.clock.error if part.clock.seconds else 0.0 for part in trace}
    num_drafted = 0
    for plan in plans:
        number = plan.round_index
        assert planning[number].start <= drafting[number].start + off[1]
        assert verifying[number].end <= waiting[number].end + off[leader]
        if plan.draft_len:
            num_drafted += 1
            # A draft rank of its own has sent its packet before its span ends, and may be stopped between the two.
            drafted = drafting[number].end if is_shared else drafting[number].start
            assert drafted <= verifying[number].start + off[1] + off[leader]
    for plan, following in itertools.pairwise(plans):
        if not is_shared and plan.sampled_rows:  # the draft rank has heard the verdict before its next round
            begun = verifying[plan.round_index].start
            assert begun <= drafting[following.round_index].start + off[1] + off[leader]
    assert num_drafted > 3
