"""Requests at work that others may stop: those of one stream, or of one connection, by the ids of their client.

It knows ids and works. It does not know what travels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class Place:
    """A request's place among the others, from the moment that it has come."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._is_stopped = False

    def fill(self, stop: Callable[[], None]) -> None:
        """The request has been let in; `stop` makes what there is of it its last response."""
        self._stop = stop
        if self._is_stopped:
            stop()

    def stop(self) -> None:
        """Its client wants no more of it, be it at work or not let in yet."""
        self._is_stopped = True
        if self._stop is not None:
            self._stop()


class Places:
    """The requests of one stream or connection."""

    def __init__(self, around: Places | None = None) -> None:
        """Begin without requests.

        Args:
            around: those of the connection, for a stream: its requests are among these, too.
        """
        self._around = around
        self._by_id: defaultdict[str, set[Place]] = defaultdict(set)

    @contextmanager
    def take(self, request_id: str) -> Iterator[Place]:
        """A request's place, as long as it is at work."""
        place = Place()
        self._add(request_id, place)
        try:
            yield place
        finally:
            self._remove(request_id, place)

    def _add(self, request_id: str, place: Place) -> None:
        self._by_id[request_id].add(place)
        if self._around is not None:
            self._around._add(request_id, place)

    def _remove(self, request_id: str, place: Place) -> None:
        self._by_id[request_id].discard(place)
        if not self._by_id[request_id]:
            del self._by_id[request_id]
        if self._around is not None:
            self._around._remove(request_id, place)

    def stop(self, request_id: str) -> None:
        """Stop all requests of an id; nothing where there is none."""
        for place in tuple(self._by_id.get(request_id, ())):
            place.stop()

    def __len__(self) -> int:
        return len(self._by_id)


class PlacesByCaller:
    """The same for each of many callers, as long as they have calls."""

    def __init__(self) -> None:
        self._callers: defaultdict[Hashable, Places] = defaultdict(Places)
        self._num_calls: Counter[Hashable] = Counter()

    @contextmanager
    def of(self, caller: Hashable) -> Iterator[Places]:
        """The requests of one caller, within a call of theirs. A stream is one, though it may have none at times."""
        self._num_calls[caller] += 1
        try:
            yield self._callers[caller]
        finally:
            self._num_calls[caller] -= 1
            if not self._num_calls[caller]:
                del self._num_calls[caller]
                del self._callers[caller]

    def __len__(self) -> int:
        return len(self._callers)
