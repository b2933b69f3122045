"""Requests that come together begin together: after a rest, the first of them waits until the others are read, too.

A round that has begun with the first one alone makes all others wait for its end, and its text is written while they
should be read. Clients that send several at once are common: a batch, or workers that wait for each other. While others
are in work nobody waits here: the rounds go on anyway. It knows turns of the event loop and how many are let in. It
does not know what requests are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from launch.serve.door.limits import Door

MOST_SECONDS = 0.02
"""How long a request may wait here: in this time some tens are read."""

_TURNS = 2
"""Of the event loop, after which what its sockets had is read: one looks at them, the next one reads the requests."""


class ArrivalBatches:
    """Where requests that are read wait for those that came with them."""

    def __init__(self, door: Door, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody waits.

        Args:
            door: says how many are in work; who waits or comes here has come through it.
            clock: seconds; for tests.
        """
        self._door = door
        self._clock = clock
        self._num_come = 0
        self._num_coming = 0
        self._num_announced = 0
        self._num_waiting = 0
        self._all_have_come = asyncio.Event()
        self._opened: asyncio.Event | None = None
        self._opening: asyncio.Task[None] | None = None

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Around what a request is waited for until it waits here itself: nothing long."""
        self._num_coming += 1
        self._all_have_come.clear()
        try:
            yield
        finally:
            self._num_coming -= 1
            self._note_arrival()

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Around what a request is waited for that has not come through the door: the same, as long as nobody is in
        work."""
        self._num_announced += 1
        self._all_have_come.clear()
        try:
            yield
        finally:
            self._num_announced -= 1
            self._note_arrival()

    def _note_arrival(self) -> None:
        if not self._num_coming and not self._num_announced:
            self._all_have_come.set()

    async def wait(self) -> None:
        """Wait until nobody comes any more, or some have begun. All that have waited go on in one turn of the event
        loop, and what is sent to the engine in one turn begins there together.
        """
        self._num_come += 1
        self._num_waiting += 1
        try:
            if self._nobody_is_in_work():
                await self._gathered().wait()
        finally:
            self._num_waiting -= 1

    def _gathered(self) -> asyncio.Event:
        """Set once those that wait now may begin: one task looks for all of them, however many they are."""
        if self._opened is None:
            self._opened = asyncio.Event()
            self._opening = asyncio.create_task(self._gather(self._opened, self._clock() + MOST_SECONDS))
        return self._opened

    async def _gather(self, opened: asyncio.Event, deadline: float) -> None:
        num_come = 0
        while (self._num_come > num_come or self._num_expected) and self._nobody_is_in_work():
            left = deadline - self._clock()
            if left <= 0:
                break
            if self._num_expected:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_have_come.wait(), left)
            num_come = self._num_come
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        self._opened = None
        opened.set()

    @property
    def _num_expected(self) -> int:
        """Requests that will wait here soon."""
        return self._num_coming + self._num_announced

    def _nobody_is_in_work(self) -> bool:
        """Whether all that are let in wait here, or will at once."""
        return self._door.num_requests == self._num_waiting + self._num_coming
