"""A worker rank's life: messages of the orchestrator in their order, and the rounds that it has launched.

A round is launched as soon as its plan is there and the rounds before allow it; what it ends with is reported when it
is known. It does not know what a round is made of, or what plans say.
"""

from __future__ import annotations

from collections import deque

from parallel.control import ControlPlane
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.launched_round import LaunchedRound
from trtrun.rounds.prepared_work import AdapterDesk, GuideDesk
from trtrun.rounds.round import Worker
from trtrun.timing.tracing import PhaseTracer
from trtrun.wire.messages import are_guide_orders, decode_adapter_order, decode_guide_orders
from trtrun.wire.plans import decode_plan, is_plan
from trtrun.wire.reports import ReportArrays, ReportKind


def serve(control: ControlPlane, worker: Worker) -> None:
    """A worker rank's life after start-up: run plans in order, load adapters, be traced, until it is let end."""
    served = _Served(control, worker)
    while not control.is_shut_down:
        served.go_on()
    served.end()


class _Served:
    """What a worker rank has been told and has not done, and the rounds that it has launched.

    Args:
        control: its end of the control plane.
        worker: whose rounds these are.
    """

    def __init__(self, control: ControlPlane, worker: Worker) -> None:
        self._control = control
        self._worker = worker
        self._tracer, self._desk, self._adapters = PhaseTracer(worker), GuideDesk(worker.guides), AdapterDesk(worker)
        self._messages: deque[RoundPlan | bytes] = deque()
        self._launched: deque[LaunchedRound] = deque()

    def go_on(self) -> None:
        """Do what can be done; else wait for a message, or for a round's end."""
        for built in self._desk.take_answers():
            self._control.report(built, kind=ReportKind.GUIDE_BUILT)
        for read in self._adapters.take_answers():
            self._control.report(read, kind=ReportKind.ADAPTER_READ)
        launched = self._launched
        if launched and launched[0].is_done():
            report = launched.popleft().finish()
            self._take_in()  # the next draft goes before the report, as the target may be waiting for it
            self._tell(report)
            if launched:
                launched[0].release()
            return
        if not launched:
            self._worker.activity.rest()
        # A plan that comes while the device works is launched behind what it does.
        waits = launched or self._desk.is_waiting or self._adapters.is_waiting
        payload = self._control.receive(until=self._has_news if waits else None)
        if payload is not None:
            self._messages.append(decode_plan(payload) if is_plan(payload) else payload)
            self._take_in()

    def end(self) -> None:
        """Run all that was told before the end: other ranks of the group may be in it already, and wait for this one.
        Nobody takes reports any more."""
        while self._launched:
            self._launched.popleft().finish()
            self._take_in()
            if self._launched:
                self._launched[0].release()

    def _has_news(self) -> bool:
        is_done = bool(self._launched) and self._launched[0].is_done()
        return is_done or self._desk.has_answer() or self._adapters.has_answer()

    def _take_in(self) -> None:
        """Do what messages say, in their order, until one has to wait for the end of rounds."""
        while self._messages and self._may_do(self._messages[0]):
            message = self._messages.popleft()
            if isinstance(message, RoundPlan):
                self._launched.append(self._worker.launch_round(message))
                if len(self._launched) == 1:
                    self._launched[0].release()
            elif (orders := decode_guide_orders(message)) is not None:
                self._desk.take(orders)
            elif (order := decode_adapter_order(message)) is not None:
                if not self._launched:
                    self._worker.activity.rest()
                self._adapters.take(order)
            else:
                self._worker.activity.rest()  # no round is left
                answer = self._tracer.answer(message)
                assert answer is not None
                self._control.report(answer, kind=ReportKind.ANSWER)

    def _may_do(self, message: RoundPlan | bytes) -> bool:
        """Whether launched rounds allow it: what fills a slot waits for the device, what is traced is whole rounds."""
        if isinstance(message, RoundPlan):
            return all(one.may_be_followed for one in self._launched)
        order = decode_adapter_order(message)
        reads = order is not None and order.path is not None
        return not self._launched or reads or are_guide_orders(message)

    def _tell(self, report: ReportArrays | None) -> None:
        if report is not None:
            self._control.report(report.encode(), kind=ReportKind.ROUND)
