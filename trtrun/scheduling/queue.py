"""The waiting queue: requests without a row, first come first served, preempted ones ahead of the rest.

It knows the order only; when a request may leave the queue is the scheduler's decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trtrun.scheduling.completion import Completion


class WaitingQueue:
    """Requests in order of arrival.

    A preempted request goes to the front. The scheduler preempts the most recently admitted row first, and rows are
    admitted in order of arrival, so the queue stays sorted by arrival.
    """

    def __init__(self) -> None:
        self._queue: deque[Completion] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._queue)

    def first(self) -> Completion:
        """The request that is next, which stays in the queue."""
        return self._queue[0]

    def pop(self) -> Completion:
        """Take the request that is next."""
        return self._queue.popleft()

    def push_back(self, running: Completion) -> None:
        """A new request arrives."""
        self._queue.append(running)

    def push_front(self, running: Completion) -> None:
        """A preempted request comes back."""
        self._queue.appendleft(running)

    def remove(self, running: Completion) -> None:
        """Take a request out wherever it stands."""
        self._queue.remove(running)
