"""The guides that completions need: which the ranks were told to build, and which are built there.

A completion whose guide is not built takes no part in turns (`queue.py`), so that no round waits for it. What is built
is a start: a guide, and the tokens that it has followed already, of a completion that lost its row or goes on where
another engine left it. It stays built until the last completion that needs it has ended, or has got further. It knows
starts as values. It does not know what they mean, who builds them, or how long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from trtrun.core.guide import GuideStart

MOST_ORDERED = 8
"""Starts that are built at a time: those ordered first are built first, and a long queue of large ones would keep a
small one waiting whose turn comes before theirs."""

MOST_OF_ONE = 2
"""Builds of one guide among them: many completions that go on with a large one would keep all others waiting."""

MOST_AHEAD = 16
"""Starts without a row, built or not: each may take hundreds of megabytes."""


class GuideOrders(NamedTuple):
    """What ranks are to do: forget the guides that are over, then begin to build others."""

    over: tuple[GuideStart, ...]
    begun: tuple[GuideStart, ...]

    def __bool__(self) -> bool:
        return bool(self.over or self.begun)


class GuideRegistry:
    """The guides of all completions of a scheduler, as starts."""

    def __init__(self) -> None:
        self._users: dict[GuideStart, int] = {}
        self._ordered: set[GuideStart] = set()
        self._built: set[GuideStart] = set()
        self._ahead: set[GuideStart] = set()
        self._over: list[GuideStart] = []

    @property
    def has_news(self) -> bool:
        """Whether ranks are to be told something, or are to tell something."""
        return bool(self._over or self._ordered) or self._num_unordered > 0

    @property
    def _num_unordered(self) -> int:
        return len(self._users) - len(self._ordered) - len(self._built)

    def add(self, start: GuideStart) -> bool:
        """A completion came that needs a guide; whether that is built."""
        self._users[start] = self._users.get(start, 0) + 1
        return start in self._built

    def remove(self, start: GuideStart) -> None:
        """A completion that needs it has ended, or goes on from elsewhere."""
        self._users[start] -= 1
        if self._users[start]:
            return
        del self._users[start]
        if start in self._ordered or start in self._built:
            self._over.append(start)
            for of_state in (self._ordered, self._built, self._ahead):
                of_state.discard(start)

    def remove_all(self) -> None:
        """All completions are forgotten."""
        for start in list(self._users):
            self._users[start] = 1
            self.remove(start)

    def note_row(self, start: GuideStart) -> None:
        """A completion that needs a guide has got a row."""
        self._ahead.discard(start)

    def note_built(self, start: GuideStart) -> bool:
        """A guide is built, or cannot be, which its rows will show; whether anybody waited for it."""
        if start not in self._ordered:
            return False
        self._ordered.remove(start)
        self._built.add(start)
        return True

    def take_orders(self, wanted: Callable[[], Iterable[GuideStart]]) -> GuideOrders:
        """What ranks are to do, once.

        Args:
            wanted: guides of completions that wait, those first that come first. Not asked where there is none to
                order, or no room, and read as far as there is.
        """
        over, begun = tuple(self._over), list[GuideStart]()
        self._over.clear()
        room = min(MOST_ORDERED - len(self._ordered), MOST_AHEAD - len(self._ahead))
        if room > 0 and self._num_unordered:
            for start in islice(filter(self._may_order, wanted()), room):
                self._ordered.add(start)
                self._ahead.add(start)
                begun.append(start)
        return GuideOrders(over, tuple(begun))

    def _may_order(self, start: GuideStart) -> bool:
        if start in self._ordered:
            return False
        return [other.guide for other in self._ordered].count(start.guide) < MOST_OF_ONE
