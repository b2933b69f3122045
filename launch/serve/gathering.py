"""Requests that come together begin together: after a rest, the first of them waits until the others are read, too.

A round that has begun with the first one alone makes all others wait for its end, and its text is written while they
should be read. Clients that send several at once are common: a batch, or workers that wait for each other. While others
are in work nobody waits here: the rounds go on anyway. It knows turns of the event loop and how many are let in. It
does not know what requests are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from launch.serve.limits import Door

MOST_SECONDS = 0.02
"""How long a request may wait here: in this time some tens are read."""

_TURNS = 2
"""Of the event loop, after which what its sockets had is read: one looks at them, the next one reads the requests."""


class Gathering:
    """Where requests that are read wait for those that came with them."""

    def __init__(self, door: Door, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody waits.

        Args:
            door: says how many are in work; who waits here has come through it.
            clock: seconds; for tests.
        """
        self._door = door
        self._clock = clock
        self._num_come = 0
        self._num_waiting = 0

    async def wait(self) -> bool:
        """Wait until nobody comes any more, or some have begun.

        Returns:
            Whether some of those that have waited are still to begin.
        """
        self._num_come += 1
        self._num_waiting += 1
        deadline = self._clock() + MOST_SECONDS
        num_come = 0
        try:
            while self._are_others_coming(num_come) and self._clock() < deadline:
                num_come = self._num_come
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
        finally:
            self._num_waiting -= 1
        return self._num_waiting > 0

    def _are_others_coming(self, num_come: int) -> bool:
        """Whether some have come since there were `num_come`, and all that are let in wait here."""
        return self._num_come > num_come and self._door.num_requests == self._num_waiting
