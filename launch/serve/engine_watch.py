"""Watches whether the engine gets on: one that hangs does not end, and nobody else need notice.

The front asks the engine's process about once a second whether it is there, and for how long its round has got no
further. Where ranks have a heartbeat, that judges their rounds, and names who is at fault; this is for the process that
holds the engine core, and for an engine of one process, which nobody else watches. A long round is none that hangs, as
long as layers get done. It knows times, and no process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from parallel.watchdog.heartbeat_server import PATIENCE_BEATS, beat_seconds

END_SECONDS = 10.0
"""How long an engine that hangs is left alone: a job of several ranks ends by itself, and says why."""


class EngineWatch:
    """One engine at a time, from `begin` to `end`.

    Attributes:
        is_hanging: whether the engine that is there has not got on for too long.
    """

    def __init__(
        self,
        limit: float,
        ask: Callable[[], None],
        on_hang: Callable[[str], None],
        on_recovery: Callable[[], None],
        on_overdue: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch nothing yet.

        Args:
            limit: most seconds in which the engine does not get on (`launch.heartbeat_seconds`).
            ask: has the engine answer, which `hear` is told.
            on_hang: called with the cause when it begins to hang.
            on_recovery: called when it gets on again.
            on_overdue: called when it has hung for END_SECONDS.
            clock: seconds; for tests.
        """
        self.is_hanging = False
        self._limit = limit
        self._ask = ask
        self._on_hang = on_hang
        self._on_recovery = on_recovery
        self._on_overdue = on_overdue
        self._clock = clock
        self._beat = beat_seconds(limit)
        self._is_there = False
        self._is_overdue = False
        self._looked = self._heard = self._got_on = 0.0

    def begin(self) -> None:
        """An engine is there."""
        self._is_there, self.is_hanging, self._is_overdue = True, False, False
        self._looked = self._heard = self._got_on = self._clock()

    def end(self) -> None:
        """It is gone."""
        self._is_there = self.is_hanging = False

    def hear(self, unwatched_seconds: float) -> None:
        """The engine has answered.

        Args:
            unwatched_seconds: for how long its round has got no further; 0 where others watch it.
        """
        self._heard = self._clock()
        self._got_on = self._heard - unwatched_seconds

    async def watch_on(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._beat)
            self.look()

    def look(self) -> None:
        """Judge the engine by what was heard, and ask again."""
        if not self._is_there:
            return
        now = self._clock()
        late = now - self._looked - self._beat
        self._looked = now
        if late > PATIENCE_BEATS * self._beat:  # this process was stopped or held up: that is no news of the engine
            self._heard, self._got_on = self._heard + late, self._got_on + late
        silent, still = now - self._heard, now - self._got_on
        seconds = max(silent, still)
        if seconds <= self._limit:
            if self.is_hanging:
                self.is_hanging = self._is_overdue = False
                self._on_recovery()
        elif not self.is_hanging:
            self.is_hanging = True
            what = "it has not answered" if silent > self._limit else "its round has got no further"
            self._on_hang(f"the engine hangs: {what} for {self._limit:g} s (launch.heartbeat_seconds)")
        elif seconds > self._limit + END_SECONDS and not self._is_overdue:
            self._is_overdue = True
            self._on_overdue()
        self._ask()
