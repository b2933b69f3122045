"""How long the phases of rounds took, and while a trace is taken also when: from the clock on the host, or from events
on a GPU.

Kernels on a GPU run after the calls that launch them have returned, so the clock would tell the time of launching.
Events are recorded at the borders of the phases instead and read once they are behind: on the target leader after the
one copy to the host of the round, on a draft leader with a device of its own with a later report. Nothing ever waits
for an event. It knows names of phases and numbers of rounds, and nothing of what either means or who asks for a trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import override

from trtrun.timing.spans import SpanLog


class PhaseClock(Protocol):
    """Times the phases of one round after the other."""

    def start(self, round_index: int) -> None:
        """A round begins, and with it its first phase."""
        ...

    def end(self, phase: str) -> None:
        """`phase` ends here, and the next one begins."""
        ...

    def take(self) -> dict[str, float]:
        """Seconds by phase that are known and were not taken before: of this round, of earlier ones, or of none."""
        ...


class HostPhases(PhaseClock):
    """Phases of work that is done when its call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Time with `clock`, in seconds."""
        self._clock = clock
        self._last = 0.0
        self._seconds: dict[str, float] = {}

    @override
    def start(self, round_index: int) -> None:
        self._last = self._clock()

    @override
    def end(self, phase: str) -> None:
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @override
    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self, stream: Any = None) -> None:
        """Mark this place of `stream`."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark; does not wait."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to a later one; both are passed."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        ...


def timing_event() -> Event:
    """A new event of the current GPU that can tell times."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def current_stream() -> object:
    """The stream of the current GPU to which calls launch now."""
    return torch.cuda.current_stream()


class RoundBorders(NamedTuple):
    """The events of one round: the first where it began, then each with the phase that ended there."""

    round_index: int
    borders: list[tuple[str, Event]]


class DevicePhases(PhaseClock):
    """Phases of work that a GPU does after its launch, on the stream that is current when a round begins.

    Events are used again. The stream is asked for once a round, because that takes longer than recording an event.
    """

    def __init__(
        self, make_event: Callable[[], Event] = timing_event, find_stream: Callable[[], object] = current_stream
    ) -> None:
        """Time with the events of `make_event` on the stream of `find_stream`."""
        self._make_event = make_event
        self._find_stream = find_stream
        self._stream: object = None
        self._spare: list[Event] = []
        # Rounds whose times are not taken yet, the oldest first.
        self._rounds: deque[RoundBorders] = deque()

    @override
    def start(self, round_index: int) -> None:
        self._stream = self._find_stream()
        self._rounds.append(RoundBorders(round_index, [("", self._record())]))

    @override
    def end(self, phase: str) -> None:
        self._rounds[-1].borders.append((phase, self._record()))

    @override
    def take(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for passed in self._passed():
            for (_, before), (phase, after) in pairwise(passed.borders):
                seconds[phase] = seconds.get(phase, 0.0) + before.elapsed_time(after) / 1000
        return seconds

    def _passed(self) -> Iterator[RoundBorders]:
        """Rounds that the device has done, the oldest first, each once; their events are used again. Not one that has
        just begun: times of the round before may be taken while it is launched."""
        while self._rounds and not self._has_just_begun() and self._rounds[0].borders[-1][1].query():
            passed = self._rounds.popleft()
            yield passed
            self._spare += [event for _, event in passed.borders]

    def _has_just_begun(self) -> bool:
        """Whether the only round that is left has no phase yet."""
        return len(self._rounds) == 1 and len(self._rounds[0].borders) == 1

    def _record(self) -> Event:
        event = self._spare.pop() if self._spare else self._make_event()
        event.record(self._stream)
        return event


def phase_clock(device: torch.device) -> PhaseClock:
    """The clock for phases that run on `device`. Its times must be taken: a GPU's events wait until then."""
    return DevicePhases() if device.type == "cuda" else HostPhases()


REFERENCE_TRIES = 8
"""Readings of the host's clock beside an event, of which the closest counts."""


class SpanClock(PhaseClock, Protocol):
    """A phase clock that logs every phase that ends."""

    def finish(self) -> None:
        """Wait until the device has done all rounds, and log the last of them."""
        ...


class HostSpans(HostPhases, SpanClock):
    """Spans of work that is done when its call returns."""

    def __init__(self, log: SpanLog, clock: Callable[[], float] = time.perf_counter) -> None:
        """Log into `log`, in seconds of `clock`."""
        super().__init__(clock)
        self._log = log
        self._round_index = 0

    @override
    def start(self, round_index: int) -> None:
        super().start(round_index)
        self._round_index = round_index

    @override
    def end(self, phase: str) -> None:
        before = self._last
        super().end(phase)
        self._log.add(phase, self._round_index, before, self._last)

    @override
    def finish(self) -> None:
        """Return nothing: no span is left."""


class DeviceSpans(DevicePhases, SpanClock):
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

    @override
    def start(self, round_index: int) -> None:
        """Read rounds that are behind: on ranks that do not lead nobody takes their times."""
        self._read()
        super().start(round_index)

    @override
    def take(self) -> dict[str, float]:
        self._read()
        seconds, self._seconds = self._seconds, {}
        return seconds

    @override
    def finish(self) -> None:
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
