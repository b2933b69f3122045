"""The guides that completions need: which the ranks were told to build, and which are built there.

A completion whose guide is not built takes no part in turns (`queue.py`), so that no round waits for it. A guide stays
built from there until the last completion that needs it has ended: one that is preempted finds it again. It knows
guides as values. It does not know what they mean, who builds them, or how long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from trtrun.core.guide import Guide

MOST_ORDERED = 8
"""Guides that are built at a time: those ordered first are built first, and a long queue of large ones would keep a
small one waiting whose turn comes before theirs."""

MOST_AHEAD = 16
"""Guides without a row, built or not: each may take hundreds of megabytes."""


class GuideOrders(NamedTuple):
    """What ranks are to do: forget the guides that are over, then begin to build others."""

    over: tuple[Guide, ...]
    begun: tuple[Guide, ...]

    def __bool__(self) -> bool:
        return bool(self.over or self.begun)


class GuideBooks:
    """The guides of all completions of a scheduler."""

    def __init__(self) -> None:
        self._users: dict[Guide, int] = {}
        self._ordered: set[Guide] = set()
        self._built: set[Guide] = set()
        self._ahead: set[Guide] = set()
        self._over: list[Guide] = []

    @property
    def has_news(self) -> bool:
        """Whether ranks are to be told something, or are to tell something."""
        return bool(self._over or self._ordered) or self._num_unordered > 0

    @property
    def _num_unordered(self) -> int:
        return len(self._users) - len(self._ordered) - len(self._built)

    def add(self, guide: Guide) -> bool:
        """A completion came that needs a guide; whether that is built."""
        self._users[guide] = self._users.get(guide, 0) + 1
        return guide in self._built

    def remove(self, guide: Guide) -> None:
        """A completion that needs it has ended."""
        self._users[guide] -= 1
        if self._users[guide]:
            return
        del self._users[guide]
        if guide in self._ordered or guide in self._built:
            self._over.append(guide)
            for of_state in (self._ordered, self._built, self._ahead):
                of_state.discard(guide)

    def remove_all(self) -> None:
        """All completions are forgotten."""
        for guide in list(self._users):
            self._users[guide] = 1
            self.remove(guide)

    def note_row(self, guide: Guide) -> None:
        """A completion that needs a guide has got a row."""
        self._ahead.discard(guide)

    def note_built(self, guide: Guide) -> bool:
        """A guide is built, or cannot be, which its rows will show; whether anybody waited for it."""
        if guide not in self._ordered:
            return False
        self._ordered.remove(guide)
        self._built.add(guide)
        return True

    def take_orders(self, wanted: Callable[[], Iterable[Guide]]) -> GuideOrders:
        """What ranks are to do, once.

        Args:
            wanted: guides of completions that wait, those first that come first. Not asked where there is none to
                order, or no room, and read as far as there is.
        """
        over, begun = tuple(self._over), list[Guide]()
        self._over.clear()
        room = min(MOST_ORDERED - len(self._ordered), MOST_AHEAD - len(self._ahead))
        if room > 0 and self._num_unordered:
            new = (guide for guide in wanted() if guide not in self._ordered)
            for guide in islice(new, room):
                self._ordered.add(guide)
                self._ahead.add(guide)
                begun.append(guide)
        return GuideOrders(over, tuple(begun))
