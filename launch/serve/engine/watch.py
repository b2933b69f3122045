"""Whether an engine of one process gets on, seen from the front.

The ranks of a job watch each other (`parallel.watchdog`). An engine that is one process has nobody beside it but the
front: it tells about once a second what its rounds are doing, and one that is silent, or whose round stands still, for
longer than launch.heartbeat_seconds hangs. So does one that is not up after launch.start_seconds. It knows times and
words. It does not know sockets or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launch.serve.engine.messages import Beat
from parallel.watchdog.heartbeat_server import PATIENCE_BEATS, beat_seconds
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology


def is_watched(config: RuntimeConfig) -> bool:
    """Whether the front has to watch the engine: where it is one process."""
    return make_topology(config).world_size == 1


class EngineWatch:
    """What is known of one engine after the other.

    Attributes:
        beat: seconds between two beats, and between two looks.
    """

    def __init__(self, limit: float, start_limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch one that starts now.

        Args:
            limit: seconds that an engine may be silent, or a round may stand still.
            start_limit: seconds from its start to its first beat.
            clock: seconds; for tests.
        """
        self.beat = beat_seconds(limit)
        self._limit = limit
        self._start_limit = start_limit
        self._clock = clock
        self._last: Beat | None = None
        self._begun = self._heard = self._looked = clock()

    def hear(self, beat: Beat) -> None:
        """The engine tells what it is doing."""
        self._last, self._heard = beat, self._clock()

    def forget(self) -> None:
        """It is over; another one may start now."""
        self._last, self._begun = None, self._clock()

    def find_fault(self) -> str | None:
        """Why the engine has to be ended, once it hangs. Called about once a beat."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > PATIENCE_BEATS * self.beat:  # the front was stopped, or busy: that is no news of the engine
            self._heard = now
            self._begun += now - before
        if self._last is None:
            if now - self._begun <= self._start_limit:
                return None
            self._begun = now
            return f"it has not started within {self._start_limit:g} s (launch.start_seconds)"
        if now - self._heard > self._limit:
            return f"it is silent for {self._limit:g} s, last seen {self._last.doing}"
        if self._last.still_seconds is not None and self._last.still_seconds > self._limit:
            return f"it stands still {self._last.doing} for longer than {self._limit:g} s"
        return None
