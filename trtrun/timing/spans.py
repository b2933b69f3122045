"""Spans: what a rank did from when to when, round by round, for a trace of rounds; and the phase clocks that write
them, in place of the usual ones while a trace is taken.

A log of spans is bounded by a number of rounds. It knows names of phases, seconds and the host's clock. It does not
know who asks for a trace (tracing.py), or files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from trtrun.timing.phase_clock import DevicePhases, Event, HostPhases, PhaseClock, current_stream, timing_event

ORCHESTRATOR = "orchestrator"
ENGINES = "engines"


class Span(NamedTuple):
    """A phase of a round, from `start` to `end` in seconds of some clock."""

    name: str
    round_index: int
    start: float
    end: float


class ClockOffset(NamedTuple):
    """How the clock of a rank stands to that of rank 0, in seconds.

    Attributes:
        seconds: rank 0's clock less the rank's.
        error: how far `seconds` may be off at most: half of the round trip that it was measured with.
    """

    seconds: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class RankSpans:
    """What one rank did in a run; a process that is orchestrator and engine rank in one has two of these.

    Attributes:
        rank: world rank.
        part: ORCHESTRATOR or ENGINES.
        spans: in order of time, by rank 0's clock.
        num_dropped_rounds: rounds behind those of `spans`, which the log did not take.
        clock: what the rank's own clock was corrected by.
    """

    rank: int
    part: str
    spans: list[Span]
    num_dropped_rounds: int = 0
    clock: ClockOffset = field(default_factory=ClockOffset)


class SpanLog:
    """Spans of the first rounds of a run; later ones are counted, so that a long run takes bounded memory.

    Attributes:
        spans: in order of time.
        num_dropped_rounds: how many rounds went by after the last that was kept.
    """

    def __init__(self, most_rounds: int) -> None:
        """Keep `most_rounds` rounds, from the first that is added. All ranks run the same rounds, so all keep the
        same."""
        self.spans: list[Span] = []
        self.num_dropped_rounds = 0
        self._most_rounds = most_rounds
        self._end: int | None = None

    def add(self, name: str, round_index: int, start: float, end: float) -> None:
        """Keep a span, if its round is among the first. Seconds."""
        if self._end is None:
            self._end = round_index + self._most_rounds
        if round_index < self._end:
            self.spans.append(Span(name, round_index, start, end))
        else:
            self.num_dropped_rounds = max(self.num_dropped_rounds, round_index - self._end + 1)

    def encode(self) -> bytes:
        """The bytes of the log, for rank 0."""
        return json.dumps({"spans": self.spans, "num_dropped_rounds": self.num_dropped_rounds}).encode()


def read_spans(payload: bytes, rank: int, clock: ClockOffset) -> RankSpans:
    """What an engine rank's `SpanLog.encode` gave, by rank 0's clock."""
    log = json.loads(payload)
    shift = clock.seconds
    spans = [Span(name, round_index, start + shift, end + shift) for name, round_index, start, end in log["spans"]]
    return RankSpans(rank, ENGINES, spans, log["num_dropped_rounds"], clock)


@dataclass
class IdleTime:
    """How long a rank had nothing to do, over any number of runs.

    Attributes:
        elapsed: seconds from the first span of a run to the end of its last, summed over runs.
        idle: seconds of these in which the rank waited: in no span, or in one whose name says so.
        num_rounds: rounds of these runs.
    """

    elapsed: float = 0.0
    idle: float = 0.0
    num_rounds: int = 0

    def add_run(self, spans: Sequence[Span], waits: Container[str]) -> None:
        """Add a run.

        Args:
            spans: of one rank, in order of time; none overlaps another.
            waits: names of spans in which this rank waits.
        """
        if not spans:
            return
        elapsed = spans[-1].end - spans[0].start
        busy = sum(span.end - span.start for span in spans if span.name not in waits)
        self.elapsed += elapsed
        self.idle += max(0.0, elapsed - busy)
        self.num_rounds += len({span.round_index for span in spans})

    @property
    def share(self) -> float:
        """Of the time, 0 to 1; 0 before the first run."""
        return self.idle / self.elapsed if self.elapsed else 0.0


REFERENCE_TRIES = 8
"""Readings of the host's clock beside an event, of which the closest counts."""


class SpanClock(PhaseClock, Protocol):
    """A phase clock that logs every phase that ends."""

    def finish(self) -> None:
        """Wait until the device has done all rounds, and log the last of them."""
        ...


class HostSpans(HostPhases):
    """Spans of work that is done when its call returns."""

    def __init__(self, log: SpanLog, clock: Callable[[], float] = time.perf_counter) -> None:
        """Log into `log`, in seconds of `clock`."""
        super().__init__(clock)
        self._log = log
        self._round_index = 0

    def start(self, round_index: int) -> None:
        """See PhaseClock."""
        super().start(round_index)
        self._round_index = round_index

    def end(self, phase: str) -> None:
        """See PhaseClock."""
        before = self._last
        super().end(phase)
        self._log.add(phase, self._round_index, before, self._last)

    def finish(self) -> None:
        """See SpanClock; nothing is left."""


class DeviceSpans(DevicePhases):
    """Spans of work that a GPU does after its launch.

    Events tell times from each other, so one of them, the reference, is waited for, next to a reading of the host's
    clock. The times of all others follow from it. They come in float32 milliseconds: to the microsecond for 8 s behind
    the reference, to 4 µs after a minute; and the two clocks drift apart. So each run has a reference of its own.
    """

    def __init__(
        self,
        log: SpanLog,
        clock: Callable[[], float] = time.perf_counter,
        make_event: Callable[[], Event] = timing_event,
        find_stream: Callable[[], object] = current_stream,
    ) -> None:
        """Wait for the device, and take the reference. Log into `log`, in seconds of `clock`."""
        super().__init__(make_event, find_stream)
        self._log = log
        self._seconds: dict[str, float] = {}
        self._reference, self._reference_time = self._take_reference(clock)

    def start(self, round_index: int) -> None:
        """See PhaseClock. Reads rounds that are behind: on ranks that do not lead nobody takes their times."""
        self._read()
        super().start(round_index)

    def take(self) -> dict[str, float]:
        """See PhaseClock."""
        self._read()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def finish(self) -> None:
        """See SpanClock."""
        if self._rounds:
            self._rounds[-1].borders[-1][1].synchronize()
        self._read()

    def _read(self) -> None:
        for passed in self._passed():
            times = [self._reference_time + self._reference.elapsed_time(event) / 1000 for _, event in passed.borders]
            for (phase, _), (before, after) in zip(passed.borders[1:], pairwise(times), strict=True):
                self._log.add(phase, passed.round_index, before, after)
                self._seconds[phase] = self._seconds.get(phase, 0.0) + after - before

    def _take_reference(self, clock: Callable[[], float]) -> tuple[Event, float]:
        """An event, and the time of the host's clock when the device passed it."""
        self._stream = self._find_stream()
        self._record().synchronize()  # what was launched before is done
        closest: tuple[float, Event, float] | None = None
        for _ in range(REFERENCE_TRIES):
            before = clock()
            event = self._record()
            event.synchronize()
            after = clock()
            if closest is None or after - before < closest[0]:
                closest = (after - before, event, (before + after) / 2)
        assert closest is not None  # there was at least one try
        return closest[1:]


def span_clock(device: torch.device, log: SpanLog, clock: Callable[[], float]) -> SpanClock:
    """The clock that logs phases that run on `device`; on a GPU it waits for the device first."""
    return DeviceSpans(log, clock) if device.type == "cuda" else HostSpans(log, clock)
