"""A round that an engine rank has launched, and how its report is had once the device has done it.

A GPU works after the calls that launch its work have returned, so the next round can be launched before the report of
this one is read: then the device goes from one to the other without a gap. It does not know what a round is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trtrun.roles.verdict_report import VerdictCopy
from trtrun.wire.reports import ReportArrays, RoundTimes


class LaunchedRound(Protocol):
    """One round of this rank. Rounds are finished in the order in which they were launched."""

    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        ...

    def finish(self) -> ReportArrays | None:
        """Wait for the device; the report of a leader, None elsewhere."""
        ...


@dataclass(frozen=True)
class DoneRound:
    """A round without anything to wait for.

    Attributes:
        report: of a leader; None elsewhere.
    """

    report: ReportArrays | None

    def is_done(self) -> bool:
        """See LaunchedRound."""
        return True

    def finish(self) -> ReportArrays | None:
        """See LaunchedRound."""
        return self.report


@dataclass(frozen=True)
class DecidedRound:
    """A round of the target leader, whose verdict is on its way to the host.

    Attributes:
        verdict: the copy.
        take_times: tells what phases took, once the verdict is there.
    """

    verdict: VerdictCopy
    take_times: Callable[[], RoundTimes]

    def is_done(self) -> bool:
        """See LaunchedRound."""
        return self.verdict.is_here()

    def finish(self) -> ReportArrays:
        """See LaunchedRound."""
        return self.verdict.wait(self.take_times)
