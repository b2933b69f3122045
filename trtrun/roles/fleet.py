"""The orchestrator's hands: plans go out to the engine ranks, reports come back.

Two ways with one interface: `SoloFleet` runs the one worker of a single-process job in place, `MpiFleet` talks to
worker ranks over the control plane. Neither knows what a plan means.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from parallel.control import ControlPlane
from trtrun.core import RoundPlan
from trtrun.errors import RankFailedError
from trtrun.roles.worker import Worker
from trtrun.wire import RoundReport, decode_plan, decode_report, encode_plan


class Fleet(Protocol):
    """All engine ranks, as the orchestrator sees them."""

    def publish(self, plan: RoundPlan) -> None:
        """Send a plan to every engine rank, without waiting."""
        ...

    def collect(self) -> RoundReport:
        """Wait, asleep, for the next report; verdicts come in the order of the plans.

        Raises:
            RankFailedError: a rank failed.
        """
        ...

    def close(self) -> None:
        """Let the engine ranks end."""
        ...


class SoloFleet:
    """One process with every role: a plan runs when its report is asked for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._plans: deque[RoundPlan] = deque()

    def publish(self, plan: RoundPlan) -> None:
        """See Fleet."""
        self._plans.append(plan)

    def collect(self) -> RoundReport:
        """See Fleet."""
        report = self._worker.run_round(self._plans.popleft())
        if report is None:
            raise RankFailedError("the single process of this job does not lead the target engine")
        return decode_report(report)

    def close(self) -> None:
        """See Fleet."""
        self._plans.clear()


class MpiFleet:
    """Worker ranks behind the control plane."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def publish(self, plan: RoundPlan) -> None:
        """See Fleet."""
        self._control.publish(encode_plan(plan))

    def collect(self) -> RoundReport:
        """See Fleet."""
        while True:
            received = self._control.collect(timeout=None)
            if received is not None:
                return decode_report(received.payload)

    def close(self) -> None:
        """See Fleet."""
        self._control.shut_down()


def serve(control: ControlPlane, worker: Worker) -> None:
    """A worker rank's life after start-up: run plans in order until the orchestrator lets it end."""
    while True:
        payload = control.receive(timeout=None)
        if payload is None:
            return
        report = worker.run_round(decode_plan(payload))
        if report is not None:
            control.report(report)
