"""What a round may compute for guides in its own thread, in which all rows wait. A request decides how long its guide
takes: what is beyond the budget is left to threads beside, and the rows whose it is wait for them.

Time that the thread computes counts, not how long it waits for a busy machine. It knows seconds. It does not know
guides or rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS, SECONDS_EACH = 0.005, 0.001
"""Of a round, over all its rows that are guided, and beyond that of each of them, which is what others take."""


class RoundBudget:
    """The seconds of one round at a time, counted for as long as the process runs."""

    def __init__(self) -> None:
        self._whole = self._left = SECONDS
        self._untold = 0.0

    def begin(self, num_rows: int) -> None:
        """A round begins that has so many rows that are guided."""
        self._whole = self._left = SECONDS + num_rows * SECONDS_EACH

    @property
    def is_spent(self) -> bool:
        """Whether the round is to do nothing more for guides."""
        return self._left <= 0

    @property
    def is_short(self) -> bool:
        """Whether the round is to do no more than it has to: drafts can do without."""
        return 2 * self._left <= self._whole

    def spend(self, seconds: float) -> None:
        """So much was computed."""
        self._left -= seconds
        self._untold += seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count what this thread computes meanwhile."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.spend(time.thread_time() - started)

    def take_seconds(self) -> float:
        """What was computed since the last call."""
        seconds, self._untold = self._untold, 0.0
        return seconds
