"""Work in the event loop that may be long, in parts: between them whoever else waits has a turn.

It knows the loop and the clock. It does not know what is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
