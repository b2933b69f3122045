"""The orchestrator's hands: plans go out to the engine ranks, reports come back.

Two ways with one interface: `MpiRanks` talks to worker ranks over the control plane (`served_rank.py`);
`SoloRanks` (`solo_ranks.py`) runs the one worker of a single-process job in place. None knows what a plan means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from parallel.control import ControlPlane, Report
from parallel.watchdog.activity import Activity, Doing, Phase
from trtrun.core.guide import GuideStart
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.failures import RankFailures
from trtrun.rounds.prepared_work import OrderedAdapters, OrderedGuides
from trtrun.scheduling.guide_registry import GuideOrders
from trtrun.timing.spans import RankSpans
from trtrun.timing.tracing import Answer, RankTracer
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportKind, RoundReport, decode_report


class EngineRanks(Protocol):
    """All engine ranks, as the orchestrator sees them."""

    @property
    def activity(self) -> Activity:
        """Where this process says what it is doing."""
        ...

    @property
    def draft_is_lost(self) -> bool:
        """Whether the draft engine is gone for good, and the target goes on alone. Cheap."""
        ...

    def look(self) -> Mapping[int, Doing]:
        """What each rank is doing, as far as is known, by world ranks; 0 is this process. From any thread."""
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

    def begin_adapter(self, name: str, path: Path) -> None:
        """Have every target rank read an adapter beside the rounds. Does not wait.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def take_adapter(self, seconds: float = 0.0) -> list[str] | None:
        """What is wrong with the adapter that is being read, rank by rank, and nothing where all have it; None while
        some are reading. It waits for that, `seconds` at most and no longer than until something comes from a rank.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def end_adapter(self, slot: int) -> None:
        """Have what was read fill a slot that no row has, before plans that are published from now on, or forgotten
        where that is 0.

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


class MpiRanks(EngineRanks):
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
        self._adapters = OrderedAdapters()
        self._published = -1
        self._num_due = 0
        self._is_stepping = False

    @property
    @override
    def activity(self) -> Activity:
        return self._activity

    @property
    @override
    def draft_is_lost(self) -> bool:
        """Whether draft ranks are lost, as is known from the next publish or collect on."""
        return bool(self._failures.lost_ranks)

    @override
    def look(self) -> Mapping[int, Doing]:
        return self._failures.look()

    @override
    def publish(self, plan: RoundPlan) -> None:
        self._failures.check()
        self._published = plan.round_index
        self._control.publish(encode_plan(plan))
        self._num_due += 1

    @override
    def collect(self) -> RoundReport:
        self._activity.enter(self._published, Phase.AWAITING_REPORT)
        try:
            received = self._set_aside.popleft() if self._set_aside else self._next_report()
            report = decode_report(received.payload)
            self._num_due -= report.is_verdict
            return report
        finally:
            self._leave()

    @override
    def order_guides(self, orders: GuideOrders) -> None:
        self._failures.check()
        self._control.publish(self._guides.encode(orders))

    @override
    def take_built_guides(self, seconds: float = 0.0) -> list[GuideStart]:
        built = self._take_built()
        if seconds and not built:
            report = self._failures.collect_within(seconds, self._control)
            if report is not None and not self._is_noted(report):
                self._set_aside.append(report)
            built = self._take_built()
        return built

    def _take_built(self) -> list[GuideStart]:
        return self._guides.take_built(self._control.num_workers, self._failures.lost_ranks)

    def _next_report(self) -> Report:
        """The next one that is not about guides or adapters."""
        while self._is_noted(report := self._failures.collect(self._control)):
            pass
        return report

    def _is_noted(self, report: Report) -> bool:
        """Whether a report says that a guide is built, or an adapter read, which is noted then."""
        if report.kind == ReportKind.GUIDE_BUILT:
            self._guides.note(report.rank, report.payload)
        elif report.kind == ReportKind.ADAPTER_READ:
            self._adapters.note(report.rank, report.payload)
        else:
            return False
        return True

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        self._failures.check()
        self._is_stepping = True
        self._activity.enter(self._published, Phase.SCHEDULING)
        try:
            yield
        finally:
            self._is_stepping = False
            self._activity.rest()

    @override
    def reset(self) -> None:
        while self._num_due:
            self.collect()

    @override
    def start_trace(self, most_rounds: int) -> None:
        self._tracer.start(most_rounds)

    @override
    def take_trace(self) -> list[RankSpans]:
        return self._tracer.take()

    def begin_adapter(self, name: str, path: Path) -> None:
        """Have all ranks read an adapter beside their rounds."""
        self._failures.check()
        self._control.publish(self._adapters.begin(name, path))

    def take_adapter(self, seconds: float = 0.0) -> list[str] | None:
        """What kept ranks from reading it, nothing where all have it; None while one reads."""
        problems = self._adapters.problems(self._control.num_workers, self._failures.lost_ranks)
        if problems is None and seconds:
            report = self._failures.collect_within(seconds, self._control)
            if report is not None and not self._is_noted(report):
                self._set_aside.append(report)
            problems = self._adapters.problems(self._control.num_workers, self._failures.lost_ranks)
        return problems

    @override
    def end_adapter(self, slot: int) -> None:
        self._failures.check()
        self._control.publish(self._adapters.end(slot))

    @override
    def close(self) -> None:
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
