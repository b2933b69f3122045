"""Regular expressions over names of modules, in time that does not run away.

They come with adapters, whoever made these, and Python's `re` may take longer than anybody waits for one that repeats
what is repeated. Here all places in a name are followed at once, and none is gone back to (Thompson 1968, "Regular
expression search algorithm"): a place is a bit of a whole number, and each part of a pattern takes a set of places to
those behind it. It knows names and patterns. It does not know adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Matcher = Callable[[str], bool]
Mask = Callable[[str], int]
"""Tells where in a name a character stands that matches, as bits."""
Step = Callable[[str, int], int]
"""Takes a name and places in it, as bits, to those behind what matches there."""

_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)*\$?")
"""What `re` takes no time for: nothing is repeated."""

_WORD = re.compile(r"\w")

_CHARACTERS = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)

_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_NOT_DIGIT: r"\D", codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S", codes.CATEGORY_WORD: r"\w", codes.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def whole_matcher(pattern: str) -> Matcher:
    """Tells whether a whole name matches, as `re.fullmatch` does.

    Raises:
        ValueError: it is no regular expression, or has what is not supported: flags, references to groups, and groups
            that are never gone back into.
    """
    try:
        compiled = re.compile(pattern)
        if is_plain(pattern):
            return lambda name: compiled.fullmatch(name) is not None
        parsed = parser.parse(pattern)
        if compiled.flags & ~re.UNICODE:
            raise ValueError("flags are not supported")
        step = _sequence(parsed)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return lambda name: bool(step(name, 1) >> len(name) & 1)


def end_matcher(pattern: str) -> Matcher:
    """Tells whether a pattern matches the end of a name, whole parts of it between dots; or from "^" on its begin.

    Raises:
        ValueError: see whole_matcher.
    """
    whole_matcher(pattern)  # says what is wrong with it alone
    if pattern.startswith("^"):
        return whole_matcher(rf"(?:{pattern})[\s\S]*")
    if not is_plain(pattern):
        return whole_matcher(rf"(?:.*\.)?(?:{pattern})")
    compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")
    return lambda name: compiled.fullmatch(name) is not None


def is_plain(pattern: str) -> bool:
    """Whether a pattern is a name, whose dots may be escaped."""
    return _PLAIN.fullmatch(pattern) is not None


def _sequence(parts: Any) -> Step:
    steps = [_step(code, value) for code, value in parts]

    def run(name: str, places: int) -> int:
        for step in steps:
            if not places:
                break
            places = step(name, places)
        return places

    return run


def _step(code: Any, value: Any) -> Step:
    if code in _CHARACTERS:
        return _character(_mask_of(code, value))
    if code is codes.BRANCH:
        return _branch([_sequence(part) for part in value[1]])
    if code is codes.SUBPATTERN:
        if value[1] or value[2]:
            raise ValueError("flags are not supported")
        return _sequence(value[3])
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        least, most, of = value
        if most is codes.MAXREPEAT and len(of) == 1 and of[0][0] in _CHARACTERS:
            return _star(least, _mask_of(*of[0]))
        return _repeat(least, most, _sequence(of))
    if code is codes.AT:
        return _at(value)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return _look(value[0] > 0, code is codes.ASSERT, _sequence(value[1]))
    raise ValueError(f"{str(code).lower()} is not supported")


def _mask_of(code: Any, value: Any) -> Mask:
    if code is codes.ANY:
        wanted = "."
    elif code is codes.IN:
        wanted = "[" + "".join(_item(*item) for item in value) + "]"
    else:
        wanted = f"[{'^' if code is codes.NOT_LITERAL else ''}{_escaped(value)}]"
    return lambda name: _mask(wanted, name)


@lru_cache(maxsize=4096)
def _mask(wanted: str, name: str) -> int:
    return sum(1 << found.start() for found in re.finditer(wanted, name))


def _character(mask: Mask) -> Step:
    return lambda name, places: (places & mask(name)) << 1


def _item(code: Any, value: Any) -> str:
    if code is codes.NEGATE:
        return "^"
    if code is codes.LITERAL:
        return _escaped(value)
    if code is codes.RANGE:
        return f"{_escaped(value[0])}-{_escaped(value[1])}"
    return _CATEGORIES[value]


def _escaped(letter: int) -> str:
    return f"\\U{letter:08x}"


def _branch(steps: Sequence[Step]) -> Step:
    def run(name: str, places: int) -> int:
        found = 0
        for step in steps:
            found |= step(name, places)
        return found

    return run


def _repeat(least: int, most: int, step: Step) -> Step:
    def run(name: str, places: int) -> int:
        # A name has as many places as letters and one more: after so many times nothing new comes.
        for _ in range(min(least, len(name) + 2)):
            before, places = places, step(name, places)
            if places in (0, before):
                break
        found = new = places
        for _ in range(min(most - least, len(name) + 2)):
            new = step(name, new) & ~found
            if not new:
                break
            found |= new
        return found

    return run


def _star(least: int, mask: Mask) -> Step:
    """A character `least` times or more: an addition carries places to the ends of all stretches that match (Cameron et
    al. 2014, "Bitwise data parallelism in regular expression matching")."""
    first = _repeat(least, least, _character(mask))

    def run(name: str, places: int) -> int:
        places, where = first(name, places), mask(name)
        return (((places & where) + where) ^ where) | places

    return run


def _at(where: Any) -> Step:
    def holds(name: str, place: int) -> bool:
        if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return place == 0
        if where in (codes.AT_END, codes.AT_END_STRING):
            return place == len(name)
        sides = [at >= 0 and _WORD.match(name, at) is not None for at in (place - 1, place)]
        return (sides[0] != sides[1]) == (where is codes.AT_BOUNDARY)

    return lambda name, places: _kept(name, places, lambda place: holds(name, place))


def _look(is_ahead: bool, is_wanted: bool, step: Step) -> Step:
    def holds(name: str, place: int) -> bool:
        if is_ahead:
            return step(name, 1 << place) != 0
        return bool(step(name, (1 << (place + 1)) - 1) >> place & 1)

    return lambda name, places: _kept(name, places, lambda place: holds(name, place) == is_wanted)


def _kept(name: str, places: int, holds: Callable[[int], bool]) -> int:
    return sum(1 << place for place in range(len(name) + 1) if places >> place & 1 and holds(place))
