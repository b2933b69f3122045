"""The orchestrator's hands: plans go out to the engine ranks, reports come back.

Two ways with one interface: `MpiRanks` talks to worker ranks over the control plane (`served_rank.py`);
`SoloRanks` (`solo_ranks.py`) runs the one worker of a single-process job in place. None knows what a plan means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from parallel.control import ControlPlane, Report
from parallel.watchdog.activity import Activity, Doing, Phase
from trtrun.core.guide import GuideStart
from trtrun.core.nouns import RoundPlan
from trtrun.roles.failures import RankFailures
from trtrun.roles.ordered_guides import OrderedGuides
from trtrun.scheduling.guide_books import GuideOrders
from trtrun.timing.spans import RankSpans
from trtrun.timing.tracing import Answer, RankTracer
from trtrun.wire.adapter_loads import encode_load
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportKind, RoundReport, decode_report


class EngineRanks(Protocol):
    """All engine ranks, as the orchestrator sees them."""

    @property
    def draft_is_lost(self) -> bool:
        """Whether the draft engine is gone for good, and the target goes on alone. Cheap."""
        ...

    def look(self) -> Doing:
        """What this process's part of the rounds is doing. From any thread."""
        ...

    def publish(self, plan: RoundPlan) -> None:
        """Send a plan to every engine rank, without waiting.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def collect(self) -> RoundReport:
        """Wait for the next report; verdicts come in the order of the plans.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def order_guides(self, orders: GuideOrders) -> None:
        """Have guides built, before plans that are published from now on, or forgotten behind those before. Does not
        wait.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def take_built_guides(self, seconds: float = 0.0) -> list[GuideStart]:
        """Guides that all ranks have built since the last call. Where there are none it waits, `seconds` at most and no
        longer than until something comes from a rank; without them it does not look.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """The time in which the orchestrator must not stand still; outside of it the user's program has the word.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def reset(self) -> None:
        """Leave no plan without a report: after an exception in the middle of a round, nothing of it may come later.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def load_adapter(self, slot: int, path: Path) -> list[str]:
        """Have every target rank fill a slot that no row has; what is wrong, rank by rank, and nothing where all have.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def start_trace(self, most_rounds: int) -> None:
        """Log the phases of the next `most_rounds` rounds on every rank. Between rounds: no plan is out.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def take_trace(self) -> list[RankSpans]:
        """End the log of every rank, and return them in rank order, by this process's clock. Between rounds.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def close(self) -> None:
        """Let the engine ranks end; after a failure they end with this process."""
        ...


class MpiRanks:
    """Worker ranks behind the control plane.

    Args:
        control: the control plane.
        activity: of this process, the orchestrator.
        failures: of the ranks.
    """

    def __init__(self, control: ControlPlane, activity: Activity, failures: RankFailures) -> None:
        self._control = control
        self._activity = activity
        self._failures = failures
        self._tracer = RankTracer(self._ask)
        # A draft leader's report of the last round before a trace may come after the first request.
        self._set_aside: deque[Report] = deque()
        self._guides = OrderedGuides()
        self._published = -1
        self._num_due = 0
        self._is_stepping = False

    @property
    def draft_is_lost(self) -> bool:
        """See EngineRanks; known from the next publish or collect on."""
        return bool(self._failures.lost_ranks)

    def look(self) -> Doing:
        """See EngineRanks."""
        return self._activity.look()

    def publish(self, plan: RoundPlan) -> None:
        """See EngineRanks."""
        self._failures.check()
        self._published = plan.round_index
        self._control.publish(encode_plan(plan))
        self._num_due += 1

    def collect(self) -> RoundReport:
        """See EngineRanks."""
        self._activity.enter(self._published, Phase.AWAITING_REPORT)
        try:
            received = self._set_aside.popleft() if self._set_aside else self._next_report()
            report = decode_report(received.payload)
            self._num_due -= report.is_verdict
            return report
        finally:
            self._leave()

    def order_guides(self, orders: GuideOrders) -> None:
        """See EngineRanks."""
        self._failures.check()
        self._control.publish(self._guides.encode(orders))

    def take_built_guides(self, seconds: float = 0.0) -> list[GuideStart]:
        """See EngineRanks."""
        built = self._take_built()
        if seconds and not built:
            report = self._failures.collect_within(seconds, self._control)
            if report is not None and not self._is_of_guide(report):
                self._set_aside.append(report)
            built = self._take_built()
        return built

    def _take_built(self) -> list[GuideStart]:
        return self._guides.take_built(self._control.num_workers, self._failures.lost_ranks)

    def _next_report(self) -> Report:
        """The next one that is not about guides."""
        while self._is_of_guide(report := self._failures.collect(self._control)):
            pass
        return report

    def _is_of_guide(self, report: Report) -> bool:
        """Whether a report says that a guide is built, which is noted then."""
        if report.kind == ReportKind.GUIDE_BUILT:
            self._guides.note(report.rank, report.payload)
        return report.kind == ReportKind.GUIDE_BUILT

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See EngineRanks."""
        self._failures.check()
        self._is_stepping = True
        self._activity.enter(self._published, Phase.SCHEDULING)
        try:
            yield
        finally:
            self._is_stepping = False
            self._activity.rest()

    def reset(self) -> None:
        """See EngineRanks."""
        while self._num_due:
            self.collect()

    def start_trace(self, most_rounds: int) -> None:
        """See EngineRanks."""
        self._tracer.start(most_rounds)

    def take_trace(self) -> list[RankSpans]:
        """See EngineRanks."""
        return self._tracer.take()

    def load_adapter(self, slot: int, path: Path) -> list[str]:
        """See EngineRanks."""
        answers = sorted(self._ask(encode_load(slot, path)))
        return [answer.payload.decode() for answer in answers if answer.payload]

    def close(self) -> None:
        """See EngineRanks."""
        self._failures.close(self._control)

    def _ask(self, request: bytes) -> Iterator[Answer]:
        """Send a request to every worker, and yield the answers of all as they come."""
        self._failures.check()
        self._activity.enter(self._published, Phase.AWAITING_REPORT)
        try:
            self._control.publish(request)
            due = self._control.num_workers
            while due:
                report = self._next_report()
                if report.kind == ReportKind.ROUND:
                    self._set_aside.append(report)
                    continue
                due -= 1
                yield Answer(report.rank, report.payload)
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._is_stepping:
            self._activity.enter(self._published, Phase.SCHEDULING)
        else:
            self._activity.rest()
