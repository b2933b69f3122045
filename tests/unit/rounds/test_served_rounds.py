"""A worker rank's life: in which order rounds are launched, released and finished, and what may not come between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parallel.watchdog.activity import Activity, Phase
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.served_rank import serve
from trtrun.timing.phase_clock import HostPhases
from trtrun.wire.messages import AdapterOrder, encode_adapter_order
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportArrays, RoundTimes


def plan(round_index: int) -> RoundPlan:
    nothing, none = np.zeros(0, dtype=np.int32), np.zeros((0, 3), dtype=np.int32)
    return RoundPlan(round_index, (), (), none, (), nothing, nothing, nothing, 1)


READ = encode_adapter_order(AdapterOrder(1, "a", Path("adapter")))
FILL = encode_adapter_order(AdapterOrder(1, slot=2))


class Rank:
    """A worker, its rounds and its end of the control plane: what happens is in `said`. With `may_be_followed` a round
    is launched while another one runs."""

    def __init__(self, messages: list[bytes | None], may_be_followed: bool) -> None:
        self._may_be_followed = may_be_followed
        self.said: list[str] = []
        self.is_shut_down = False
        self.device, self.activity, self.phases, self.guides = None, Activity(), HostPhases(), None
        self._messages = deque(messages)
        self._done: set[int] = set()

    def receive(self, timeout: float | None = None, until: Callable[[], bool] | None = None) -> bytes | None:
        """The next message; None is a moment at which the oldest round's verdict comes."""
        if not self._messages:
            self.is_shut_down = True
            return None
        message = self._messages.popleft()
        for thread in threading.enumerate():
            if thread.name == "adapter":
                thread.join()
        if message is None:
            self._done.add(min(self.rounds()))
            assert until is not None and until()
        return message

    def rounds(self) -> set[int]:
        """Launched and not finished."""
        return {int(one.split()[1]) for one in self.said if one.startswith("launch")} - {
            int(one.split()[1]) for one in self.said if one.startswith("finish")
        }

    def report(self, payload: bytes, kind: int) -> None:
        self.said.append({0: "report", 3: "read"}[kind])

    def read_adapter(self, name: str, path: Path) -> Callable[[int], None]:
        return lambda slot: self.said.append(f"fill {slot}")

    def install_adapter(self, name: str, slot: int, fill: Callable[[int], None]) -> None:
        assert self.activity.look().is_idle, "a rank in a round must get on with it"
        fill(slot)

    def launch_round(self, plan: RoundPlan) -> SimpleNamespace:
        number = plan.round_index
        self.said.append(f"launch {number}")
        self.activity.enter(number, Phase.REPORTING)

        def finish() -> ReportArrays:
            self.said.append(f"finish {number}")
            return ReportArrays(number, RoundTimes())

        return SimpleNamespace(
            may_be_followed=self._may_be_followed,
            is_done=lambda: number in self._done,
            release=lambda: self.said.append(f"release {number}"),
            finish=finish,
        )


@pytest.mark.parametrize(
    ("may_be_followed", "messages", "expected"),
    [
        (
            True,
            [encode_plan(plan(0)), encode_plan(plan(1)), None, encode_plan(plan(2)), None, None],
            "launch 0, release 0, launch 1, finish 0, report, release 1, launch 2, finish 1, report, release 2, "
            "finish 2, report",
        ),
        (
            True,
            [encode_plan(plan(0)), None, encode_plan(plan(1)), None],
            "launch 0, release 0, finish 0, report, launch 1, release 1, finish 1, report",
        ),
        (
            True,
            [encode_plan(plan(0)), READ, encode_plan(plan(1)), FILL, None, None],
            "launch 0, release 0, read, launch 1, finish 0, report, release 1, finish 1, fill 2, report",
        ),
        (
            False,
            [encode_plan(plan(0)), READ, encode_plan(plan(1)), FILL, None, None],
            "launch 0, release 0, read, finish 0, launch 1, release 1, report, release 1, finish 1, fill 2, report",
        ),
    ],
    ids=["ahead", "one by one", "with an adapter", "behind verdicts"],
)
def test_a_round_is_released_once_the_one_before_is_told(
    may_be_followed: bool, messages: list[bytes | None], expected: str
) -> None:
    """A rank that waits for verdicts begins the next round before it reports, and keeps messages in their order."""
    rank = Rank(messages, may_be_followed)
    serve(rank, rank)  # type: ignore[arg-type]  # both ends are the test's
    assert ", ".join(rank.said) == expected


@pytest.mark.parametrize(
    ("may_be_followed", "expected"),
    [
        (True, "launch 0, release 0, launch 1, finish 0, release 1, finish 1"),
        (False, "launch 0, release 0, finish 0, launch 1, release 1, release 1, finish 1"),
    ],
    ids=["ahead", "behind verdicts"],
)
def test_the_end_comes_behind_all_rounds_that_were_told(may_be_followed: bool, expected: str) -> None:
    """It may come before a verdict on one rank and behind it on another: both run the round that follows."""
    rank = Rank([encode_plan(plan(0)), encode_plan(plan(1))], may_be_followed)
    serve(rank, rank)  # type: ignore[arg-type]  # both ends are the test's
    assert ", ".join(rank.said) == expected
