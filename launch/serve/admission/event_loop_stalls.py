"""Stalls of the event loop: how long it works without a look at anything else, while every stream waits; and a timer
by which long work yields, so that it is no stall.

Counted is the loop's own processor time, so that a busy machine, or a thread beside it, makes no stall longer. Reading
the processor's clock is a system call; so before each callback only the wall clock is read, and the processor's clock
if a millisecond has passed since its last reading. Up to that much of the preceding callbacks may be counted with a
long one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

import uvloop
from typing_extensions import override

RESOLUTION = 0.001
"""Seconds after which a reading of the processor's clock is too old to begin a stall with."""

TOLD_SECONDS = 0.05
"""Stalls beyond this are logged: nothing that a client sends may take as long."""

logger = logging.getLogger(__name__)


class LoopStalls:
    """Measures the longest stall of one thread's loop.

    Attributes:
        longest: seconds of processor time, since `begin`.
    """

    __slots__ = ("_cpu", "_cpu_clock", "_wall", "_wall_clock", "longest")

    def __init__(
        self, wall_clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Begin; tests pass other clocks, in seconds."""
        self._wall_clock, self._cpu_clock = wall_clock, cpu_clock
        self.begin()

    def begin(self) -> None:
        """Forget what has been, such as a start."""
        self.longest = 0.0
        self._wall, self._cpu = self._wall_clock(), self._cpu_clock()

    def mark(self) -> float:
        """End a stall and begin the next one. Returns its length; 0 if the processor's clock was not read."""
        wall = self._wall_clock()
        if wall - self._wall < RESOLUTION:
            return 0.0
        cpu = self._cpu_clock()
        worked = cpu - self._cpu
        if worked > self.longest:
            self.longest = worked
        self._wall, self._cpu = wall, cpu
        return worked


class MeasuredLoop(uvloop.Loop):
    """A loop of uvloop that marks the beginning of each callback: those called soon (steps of tasks among them), called
    later, or called when a file can be read, as gRPC's library does. Callbacks of uvloop's own sockets count together
    with the next of these, unless they mark themselves (`http/connections.py` does).

    Attributes:
        stalls: of this loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stalls = LoopStalls()
        self._called: object = None

    @override
    def call_soon(  # type: ignore[override]  # the same, in the words of Python 3.10
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._call, callback, args, context=context)

    @override
    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay, self._call, callback, args, context=context)

    @override
    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        super().add_reader(fd, self._call, callback, args)

    def _call(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if (seconds := self.stalls.mark()) > TOLD_SECONDS:
            logger.info("the event loop has worked %.3f s at a stretch, in or behind %r", seconds, self._called)
        self._called = getattr(callback, "__self__", callback)
        callback(*arguments)


MOST_SECONDS = 0.005
"""How long a task may work before it yields to others."""


class YieldTimer:
    """Says when one task has to yield to others: it asks behind each part of its work; parts are short."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin to work; tests pass another clock, in seconds."""
        self._clock = clock
        self._began = clock()

    def restart(self) -> None:
        """Begin anew, after something that was waited for."""
        self._began = self._clock()

    async def yield_if_due(self) -> None:
        """Yield to others if the work has gone on for long."""
        if self._clock() - self._began > MOST_SECONDS:
            await asyncio.sleep(0)
            self._began = self._clock()
