"""What a round says of drafting ahead: its time is that of the guesses of the round before it."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from trtrun.core.nouns import PrefillChunk, Request, RoundPlan
from trtrun.core.sampling_params import SamplingParams
from trtrun.rounds.commit import ahead_round
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.ahead_costs import AheadRound
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.wire.reports import RoundReport, RoundTimes


def plan_of(index: int, num_guesses: int, draft_len: int = 3, rows: int = 2) -> RoundPlan:
    nothing = np.zeros(0, dtype=np.int32)
    return RoundPlan(
        index, (), (), np.zeros((0, 3), dtype=np.int32), (), np.arange(rows, dtype=np.int32),
        np.full(rows, draft_len, dtype=np.int32), nothing, max_context=1, num_guesses=num_guesses,
    )  # fmt: skip


def report_of(index: int, draft_lens: list[int], cache_hits: list[bool]) -> RoundReport:
    rows = len(draft_lens)
    return RoundReport(index, RoundTimes(verifying=0.1), True, [1] * rows, draft_lens, [[5]] * rows, [], cache_hits)


@pytest.mark.parametrize(
    ("draft_lens", "cache_hits", "num_hits", "is_redrafted"),
    [
        ([3, 3], [True, True], 2, False),
        ([3, 3], [True, False], 1, True),
        ([3, 0], [True, False], 1, False),  # a row that missed, and was not drafted for again
        ([0, 0], [True, True], 0, False),  # drafts that came too late
    ],
)
def test_who_hit_and_whether_a_fresh_draft_was_waited_for(
    draft_lens: list[int], cache_hits: list[bool], num_hits: int, is_redrafted: bool
) -> None:
    found = ahead_round(plan_of(4, 8), plan_of(5, 32), report_of(5, draft_lens, cache_hits), 0.2)
    assert found == AheadRound(2, 3, 8, num_hits, is_redrafted, 0.1, 0.2, [1, 1], draft_lens)


def test_a_round_that_had_something_else_to_do_has_no_time() -> None:
    before, plan, report = plan_of(4, 8), plan_of(5, 8), report_of(5, [3, 3], [True, True])
    chunk = PrefillChunk(2, 0, 9, is_last=True, has_draft_kv=True)
    for others in (
        (None, plan),
        (replace(before, round_index=3), plan),
        (replace(before, prefill=(chunk,)), plan),
        (before, replace(plan, prefill=(chunk,))),
        (plan_of(4, 8, draft_len=2), plan),
        (before, replace(plan, predicted_output_rows=(1,))),
    ):
        assert ahead_round(*others, report, 0.2).num_guesses is None
    assert ahead_round(before, plan, report, 0.2).num_guesses == 8


class LateDraft:
    """Ranks whose draft leader tells of a round `delay` rounds later, with chances that name it; each row gains a
    token a round. A round takes as many seconds as verdicts were guessed in the one before."""

    stepping = nullcontext
    draft_is_lost = False

    def __init__(self, delay: int) -> None:
        self.now = 0.0
        self._delay = delay
        self._reports: deque[RoundReport] = deque()
        self._guessed = 0

    def publish(self, plan: RoundPlan) -> None:
        index, rows = plan.round_index, len(plan.sampled_rows)
        late = index - self._delay
        if late >= 0:
            times = RoundTimes(drafting=77.0, anticipating=99.0)
            self._reports.append(RoundReport(late, times, False, [], [], [], [], hit_chances=[float(late)]))
        lens = [*plan.draft_lens.clip(min=0).tolist(), *[0] * (rows - len(plan.decode_rows))]
        self._reports.append(report_of(index, lens, [True] * rows))

    def collect(self) -> RoundReport:
        report = self._reports.popleft()
        if report.is_verdict:
            self.now += 1.0 + self._guessed
            self._guessed = report.round_index + 1
        return report


class Noted:
    """An AheadPolicy that guesses one verdict more in each round, and keeps what it is told."""

    def __init__(self) -> None:
        self.rounds: list[AheadRound] = []
        self.chances: list[list[float]] = []
        self._guesses = 0

    def num_guesses(self, num_rows: int, draft_len: int | None) -> int:
        assert (draft_len is None) == (num_rows == 0)
        self._guesses += 1
        return self._guesses

    def redraft_threshold(self, *_: Any) -> int:
        return 1

    def record_round(self, finished: AheadRound) -> None:
        self.rounds.append(finished)

    def record_chances(self, chances: list[float]) -> None:
        self.chances.append(chances)


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("delay", [1, 3])
def test_whole_rounds_are_filed_under_the_guesses_before_them(delay: int, plans_ahead: int) -> None:
    """However late the draft's leader tells of its own times, which may be those of several rounds."""
    ranks, noted = LateDraft(delay), Noted()
    scheduler = Scheduler(SchedulerLimits(4, 64, 200, 200, 3, 64, 16, plans_ahead=plans_ahead))
    orchestrator = Orchestrator(
        scheduler, cast(EngineRanks, ranks), clock=lambda: ranks.now, ahead=cast(AheadPolicy, noted)
    )
    scheduler.add(Request(0, (1, 2), SamplingParams(seed=1, max_tokens=40)))
    while orchestrator.has_work:
        orchestrator.step()
    timed = [one for one in noted.rounds if one.num_guesses is not None]
    assert len(timed) > 8
    assert all(one.seconds == pytest.approx(1.0 + (one.num_guesses or 0)) for one in timed)
    assert all(len(one.draft_lens) == one.num_rows == 1 for one in noted.rounds)
    assert [chances for chances in noted.chances if chances] and orchestrator.totals.anticipating > 99


def test_plain_rounds_say_nothing() -> None:
    ranks, noted = LateDraft(1), Noted()
    scheduler = Scheduler(SchedulerLimits(4, 64, 200, None, 0, 64, 16))
    orchestrator = Orchestrator(scheduler, cast(EngineRanks, ranks), ahead=cast(AheadPolicy, noted))
    scheduler.add(Request(0, (1, 2), SamplingParams(seed=1, max_tokens=20)))
    for _ in range(8):
        orchestrator.step()
    assert not noted.rounds
