"""When a row of a batch may begin: behind all other requests, and yet in the end.

Rows take the places of the running batch that others leave free, as many as there are, and one at least. What has begun
goes on; where others want rows it gets no more than any other client (`trtrun.scheduling.queue`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from launch.serve.admission.control import AdmissionControl

_LOOK_SECONDS = 0.1
"""How often it is looked whether others have left."""


class RowTurns:
    """Lets rows begin, batches in turn. It belongs to one event loop.

    Attributes:
        num_running: rows that have begun.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self.num_running = 0
        self._admission = admission
        self._turn = asyncio.Lock()  # first come, first served: each batch asks for one row at a time
        self._changed = asyncio.Event()

    async def begin(self) -> None:
        """Wait for a place; `end` gives it back."""
        async with self._turn:
            while not self._has_room():
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)
            self.num_running += 1

    def end(self) -> None:
        """A row is over."""
        self.num_running -= 1
        self._changed.set()

    def _has_room(self) -> bool:
        admission = self._admission
        if not admission.is_open or admission.is_hanging or admission.is_closing:
            return False
        own = max(self.num_running, admission.behind.num_completions)
        others = admission.num_completions - admission.behind.num_completions
        return not own or own + others < admission.max_running
