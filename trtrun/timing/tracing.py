"""A trace of rounds: how rank 0 turns it on at all engine ranks, and gets what they logged.

Between two runs rank 0 sends requests the way that plans go, and every engine rank answers each with one report. Before
a run it asks for readings of their clocks, until it knows how far each is from its own, and then for the start of the
log; after the run for the log. During rounds nothing is sent, and an engine rank that is not asked for a trace keeps
the usual phase clock. It does not know what phases there are, nor how requests and answers travel.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from trtrun.timing.phase_clock import PhaseClock, SpanClock, span_clock
from trtrun.timing.spans import ClockOffset, RankSpans, SpanLog, read_spans

CLOCK_READINGS = 16
"""Readings of each rank's clock; the one of the shortest round trip counts."""


class Request(enum.IntEnum):
    """What rank 0 asks for. Negative, because a plan begins with its round."""

    READ_CLOCK = -1
    START = -2
    TAKE = -3


_REQUEST = struct.Struct("=qq")  # as the numbers of plans: the request, and for START the most rounds to log
_KIND = struct.Struct("=q")
_SECONDS = struct.Struct("=d")


def encode_request(request: Request, most_rounds: int = 0) -> bytes:
    """The bytes of a request; `most_rounds` goes with START."""
    return _REQUEST.pack(request, most_rounds)


class Traceable(Protocol):
    """What is used of a worker.

    Attributes:
        device: where its phases run.
        phases: its phase clock; the trace puts one in its place that logs.
    """

    device: torch.device
    phases: PhaseClock


class PhaseTracer:
    """The trace of one process's engine ranks."""

    def __init__(self, worker: Traceable, clock: Callable[[], float] | None = None) -> None:
        """Trace `worker` by `clock`, in seconds; None takes the host's."""
        self._worker = worker
        self._clock = clock or time.perf_counter
        self._usual = worker.phases
        self._log = SpanLog(0)
        self._spans: SpanClock | None = None

    def answer(self, message: bytes) -> bytes | None:
        """The answer to a request of rank 0; None where the message is a plan."""
        if _KIND.unpack_from(message)[0] >= 0:
            return None
        kind, most_rounds = _REQUEST.unpack(message)
        if kind == Request.READ_CLOCK:
            return _SECONDS.pack(self._clock())
        if kind == Request.START:
            self.start(most_rounds)
            return b""
        return self.take().encode()

    def start(self, most_rounds: int) -> None:
        """Log the phases of the next `most_rounds` rounds."""
        self._log = SpanLog(most_rounds)
        self._spans = self._worker.phases = span_clock(self._worker.device, self._log, self._clock)

    def take(self) -> SpanLog:
        """End the log and return it; empty where none was started."""
        if self._spans is not None:
            self._spans.finish()
        self._spans = None
        self._worker.phases = self._usual
        log, self._log = self._log, SpanLog(0)
        return log


class Answer(NamedTuple):
    """What an engine rank answered."""

    rank: int
    payload: bytes


class RankTracer:
    """The trace of all engine ranks that are other processes, at rank 0.

    Args:
        ask: sends a request to all of them, and yields their answers as they come.
        clock: rank 0's, in seconds.
    """

    def __init__(
        self, ask: Callable[[bytes], Iterator[Answer]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._offsets: dict[int, ClockOffset] = {}

    def start(self, most_rounds: int) -> None:
        """Compare clocks, and let every rank log the phases of the next `most_rounds` rounds."""
        self._offsets = {}
        for _ in range(CLOCK_READINGS):
            asked = self._clock()
            for rank, payload in self._ask(encode_request(Request.READ_CLOCK)):
                offset = clock_offset(asked, _SECONDS.unpack(payload)[0], self._clock())
                known = self._offsets.get(rank)
                if known is None or offset.error < known.error:
                    self._offsets[rank] = offset
        for _ in self._ask(encode_request(Request.START, most_rounds)):
            pass

    def take(self) -> list[RankSpans]:
        """What every rank logged, in rank order, by rank 0's clock."""
        answers = sorted(self._ask(encode_request(Request.TAKE)))
        return [read_spans(payload, rank, self._offsets.get(rank, ClockOffset())) for rank, payload in answers]


def clock_offset(asked: float, reading: float, answered: float) -> ClockOffset:
    """How a clock stands to rank 0's, from one reading of it.

    The reading was taken at some time between the two of rank 0's clock, so the middle is off by half of the round trip
    at most. Where the reading itself lies between the two, the clocks are taken for one, as they are on one Linux host:
    then the order of what happened there is exact.

    Args:
        asked: rank 0's clock before the request was sent, in seconds.
        reading: the rank's clock.
        answered: rank 0's clock when the answer was there.
    """
    is_one = asked <= reading <= answered
    return ClockOffset(0.0 if is_one else (asked + answered) / 2 - reading, (answered - asked) / 2)
