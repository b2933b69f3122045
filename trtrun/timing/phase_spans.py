"""Phase clocks that also keep when each phase was, in place of the usual ones while a trace is taken.

They write into a `SpanLog`, by the host's clock. It does not know who asks for a trace (tracing.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from trtrun.timing.phase_clock import DevicePhases, Event, HostPhases, PhaseClock, current_stream, timing_event
from trtrun.timing.spans import SpanLog

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
