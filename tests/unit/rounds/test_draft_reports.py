"""Reports of the draft's leader, which come later than those of the target's: what they are filed under."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any, cast

from trtrun.core.nouns import Request, RoundPlan
from trtrun.core.sampling_params import SamplingParams
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.wire.reports import RoundReport, RoundTimes


class LateDraft:
    """Ranks whose draft leader tells of a round `delay` rounds later; each row gains a token a round."""

    stepping = nullcontext

    def __init__(self, delay: int) -> None:
        self.rows: dict[int, int] = {}
        self.draft_is_lost = False
        self._delay = delay
        self._reports: deque[RoundReport] = deque()

    def publish(self, plan: RoundPlan) -> None:
        index, sampled = plan.round_index, len(plan.sampled_rows)
        self.rows[index] = len(plan.decode_rows)
        late = index - self._delay
        if late in self.rows and not self.draft_is_lost:
            self._reports.append(RoundReport(late, RoundTimes(), False, [], [], [], [], num_guesses=late))
        gained, nothing = [[5]] * sampled, [False] * sampled
        self._reports.append(RoundReport(index, RoundTimes(), True, [1] * sampled, [0] * sampled, gained, [], nothing))

    def collect(self) -> RoundReport:
        return self._reports.popleft()


class Noted:
    """An AheadPolicy that keeps of which rows it was told, by the number of guesses."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def num_guesses(self, num_rows: int) -> int:
        return 1

    def redraft_threshold(self, num_rows: int) -> int:
        return 1

    def record_round(self, *arguments: Any) -> None:
        """Not looked at."""

    def record_draft(self, num_rows: int, num_guesses: int, *arguments: Any) -> None:
        self.rows[num_guesses] = num_rows


def test_a_draft_is_filed_under_the_rows_of_its_own_round() -> None:
    """While rows come and go; and nothing is kept of rounds of which nobody will tell any more."""
    ranks, noted = LateDraft(delay=2), Noted()
    scheduler = Scheduler(SchedulerLimits(4, 64, 200, None, 3, 64, 16))
    orchestrator = Orchestrator(scheduler, cast(EngineRanks, ranks), ahead=cast(AheadPolicy, noted))
    for number in range(4):
        scheduler.add(Request(number, (1, 2), SamplingParams(seed=1, max_tokens=4 + 3 * number)))
        orchestrator.step()
    for _ in range(12):
        orchestrator.step()
    assert len(set(noted.rows.values())) > 3 and noted.rows == {index: ranks.rows[index] for index in noted.rows}
    assert len(orchestrator._rows_drafted_for) <= 3
    ranks.draft_is_lost = True
    scheduler.add(Request(9, (1, 2), SamplingParams(seed=1, max_tokens=20)))
    for _ in range(10):
        orchestrator.step()
    assert len(orchestrator._rows_drafted_for) <= 3
