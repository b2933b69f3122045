"""How long the event loop works at a stretch: the time in which every stream waits, whoever it works for; and rests in
work that may be long, so that it is no stretch.

What is counted is the loop's own processor time, so that a busy machine, or a thread beside it, makes no stretch
longer. A reading of the processor's clock is a call of the system; so before each callback the wall clock alone is
looked at, and the other one where a millisecond is over since its last reading. Together with a long callback that much
of the ones before it may be counted. It knows event loops. It does not know what they do.
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
"""Seconds after which a reading of the processor's clock is too old to begin a stretch."""

TOLD_SECONDS = 0.05
"""Stretches beyond this are told in the log: as long as nothing that a client sends may take."""

logger = logging.getLogger(__name__)


class Stretches:
    """The longest stretch of one thread's loop.

    Attributes:
        longest: seconds of processor time, since `begin`.
    """

    __slots__ = ("_cpu", "_cpu_clock", "_wall", "_wall_clock", "longest")

    def __init__(
        self, wall_clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Begin; the clocks, in seconds, are others for tests."""
        self._wall_clock, self._cpu_clock = wall_clock, cpu_clock
        self.begin()

    def begin(self) -> None:
        """Forget what has been, such as a start."""
        self.longest = 0.0
        self._wall, self._cpu = self._wall_clock(), self._cpu_clock()

    def mark(self) -> float:
        """One stretch ends here, and the next one begins. Returns its length; 0 where that was not looked at."""
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
    """uvloop's loop, which marks the beginning of each callback that is called soon, the steps of tasks among them, or
    later, or where a file can be read, as gRPC's library has it. Those of uvloop's own sockets count together with the
    next of these, unless they mark themselves (`http/connections.py` does).

    Attributes:
        stretches: of this loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stretches = Stretches()
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
        if (seconds := self.stretches.mark()) > TOLD_SECONDS:
            logger.info("the event loop has worked %.3f s at a stretch, in or behind %r", seconds, self._called)
        self._called = getattr(callback, "__self__", callback)
        callback(*arguments)


MOST_SECONDS = 0.005
"""Of work without a rest."""


class Rests:
    """The rests of one task, which has to ask for one behind each part of its work; parts are short."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin to work; the clock, in seconds, is another one for tests."""
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """Begin anew, behind something that was waited for."""
        self._began = self._clock()

    async def rest(self) -> None:
        """Let others have their turn, where the work has gone on for long."""
        if self._clock() - self._began > MOST_SECONDS:
            await asyncio.sleep(0)
            self._began = self._clock()
