"""A parser of text that comes in parts, and the events that it yields: thoughts, text, and calls piece by piece.

What a parser finds depends on the text, and not on where it is cut. A state looks at the text that is there and takes
some of it, or waits for more. What may become a mark is held back until it is one, or cannot become one any more.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from typing_extensions import override


class Text(NamedTuple):
    """Some of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Some of what the model thinks."""

    text: str


class CallBegin(NamedTuple):
    """A call begins; with the id that the model gave it, if it did."""

    name: str
    call_id: str = ""


class Arguments(NamedTuple):
    """Some of the arguments of the call that has begun last, as JSON."""

    text: str


Event = Text | Reasoning | CallBegin | Arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Join neighbours of one kind and leave empty events out, in time proportional to their texts."""
    found: list[Event] = []
    for kind, of_kind in groupby((event for event in events if isinstance(event, CallBegin) or event.text), type):
        if kind is CallBegin:
            found += of_kind
        else:
            found.append(kind("".join(event.text for event in of_kind)))  # type: ignore[union-attr]
    return found


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Find where the first mark begins in a text, and which it is; if there is none, where one may begin at the text's
    end, and nothing. Of two at one place it is the longer one."""
    whole = _any_of(tuple(marks)).search(text)
    if whole is not None:
        return whole.start(), whole[0]
    return len(text) - max((_num_begun(text, mark) for mark in marks), default=0), ""


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first mark, and looks no further."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _num_begun(text: str, mark: str) -> int:
    """Characters at the end of a text that a mark begins with, but not all of it."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:count])), 0)


def may_become(text: str, mark: str) -> bool:
    """Whether a mark begins with a text that is not all of it."""
    return len(text) < len(mark) and mark.startswith(text)


_PIECE = 1024
"""Characters that a parser looks at in one go: what it takes off the front of its text moves the rest of them."""


class Machine(ABC):
    """The parser of one text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_over = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._begin

    def feed(self, text: str) -> list[Event]:
        """What is certain with the next part."""
        found: list[Event] = []
        for begin in range(0, len(text), _PIECE):
            self._text += text[begin : begin + _PIECE]
            found += self._work()
        return joined(found)

    def finish(self) -> list[Event]:
        """The rest, once no part follows."""
        self._is_over = True
        return joined(self._work())

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what was fed."""
        return False

    def _work(self) -> list[Event]:
        while self._state():
            pass
        found, self._events = self._events, []
        return found

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _take(self, count: int) -> str:
        """Some of what is there."""
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    @abstractmethod
    def _begin(self) -> bool:
        """The first state. Each does what it can, and says whether another one can do something. Where the text is over
        it leaves nothing of it."""


LONG = 1024
"""Characters of what begins as a call and is none, from which on looking at them again takes time."""

MOST_LONG = 16
"""So many of these a text may have, each in the one before: behind them it is text. Else the time that a text takes
would grow with the square of its length."""


class CallMachine(Machine):
    """A parser that finds calls in text. Blanks beside a call are nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self._num_long = 0
        self._blanks = ""
        self._is_behind_call = False

    def _say(self, text: str) -> None:
        """Some of the answer; blanks at its end wait for what follows."""
        if self._is_behind_call:
            text = text.lstrip()
            if not text:
                return
            self._is_behind_call = False
        kept = text.rstrip()
        if kept:
            self._events.append(Text(self._blanks + kept))
            self._blanks = ""
        self._blanks += text[len(kept) :]

    def _tell(self, events: Sequence[Event]) -> None:
        """Events of a call."""
        if events:
            self._events += events
            self._blanks, self._is_behind_call = "", True

    @override
    def finish(self) -> list[Event]:
        found = super().finish()
        return joined([*found, Text(self._blanks)])

    def _say_until(self, *marks: str) -> str:
        """Say what stands before the first mark, and say which that is; nothing where there is none yet."""
        place, mark = find_mark(self._text, marks)
        self._say(self._take(len(self._text) if self._is_over and not mark else place))
        return mark

    def _go_behind_failure(self, num_read: int, state: Callable[[], bool]) -> bool:
        """Go on where something began as a call and was none, of which so much was read."""
        self._num_long += num_read > LONG
        return self._go(state if self._num_long < MOST_LONG else self._say_rest)

    def _say_rest(self) -> bool:
        """All of it is text."""
        self._say(self._take(len(self._text)))
        return False

    def _skip_blanks(self) -> str:
        """Take blanks."""
        return self._take(len(self._text) - len(self._text.lstrip()))
