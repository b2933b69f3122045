"""Regular expressions over names of modules, in a number of steps that is counted and bounded.

They come with adapters and quantized checkpoints, whoever made these, and Python's `re` may take longer than anybody
waits. Here all places in a name are followed at once, and none is gone back to (Thompson 1968, "Regular expression
search algorithm"): a place is a bit of a whole number, and each part of a pattern takes a set of places to those behind
it, or from behind it to those before. So where a look-ahead holds is found once for all places of a name, from its end.
What is left, such as repeats of repeats, is counted: a pattern that takes too many steps is refused. It knows names and
patterns. It does not know adapters or checkpoints.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Matcher = Callable[[str], bool]
"""Raises TooManyStepsError."""

MOST_STEPS = 1 << 20
"""Of all patterns of a file over all names: some 0.4 s of a processor. A pattern of 300 characters takes a tenth over
the 560 projections of a model of 80 layers."""

_MOST_DEPTH = 50
"""Groups within each other."""

_STEPS_BETWEEN_RESTS = 1024
_REST_SECONDS = 0.0001
"""After some 0.5 ms others get the interpreter's lock: rounds go on beside, whose thread would wait 5 ms each time."""

_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)*\$?")
"""A name, whose dots may be escaped."""

_CHARACTERS = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)


def _is_of_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


_CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal, codes.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace, codes.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    codes.CATEGORY_WORD: _is_of_word, codes.CATEGORY_NOT_WORD: lambda letter: not _is_of_word(letter),
}  # fmt: skip


class TooManyStepsError(ValueError):
    """Patterns take more steps than are let in."""


class Steps:
    """The steps that the patterns of one file may still take."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.most = most
        self.left = most

    def take(self) -> None:
        """Count one.

        Raises:
            TooManyStepsError: there were too many.
        """
        self.left -= 1
        if self.left < 0:
            raise TooManyStepsError(f"it takes more than {self.most} steps to match: make it simpler, or give names")
        if not self.left % _STEPS_BETWEEN_RESTS:
            time.sleep(_REST_SECONDS)


class _Name:
    """A name that is matched, and at which of its places something holds, as bits: found out once for each part."""

    __slots__ = ("every", "found", "steps", "text")

    def __init__(self, text: str, steps: Steps) -> None:
        self.text, self.steps = text, steps
        self.every = (1 << (len(text) + 1)) - 1
        self.found: dict[object, int] = {}

    def places(self, part: object, find: Callable[[_Name], int]) -> int:
        """Where a part of the pattern holds, which `find` finds out."""
        found = self.found.get(part)
        if found is None:
            self.steps.take()
            found = self.found[part] = find(self)
        return found


Step = Callable[[_Name, int, bool], int]
"""Takes places in a name to those behind what matches there; where it goes back, from those behind to those before."""


def whole_matcher(pattern: str, steps: Steps | None = None) -> Matcher:
    """Tells whether a whole name matches, as `re.fullmatch` does.

    Args:
        pattern: of the names.
        steps: that it shares with other patterns; None for steps of its own.

    Raises:
        ValueError: it is no regular expression, or has what is not supported: flags, references to groups, and groups
            that are never gone back into.
    """
    if is_plain(pattern):
        letters = _Letters(pattern)
        return _counted(steps, lambda name: len(name) == len(letters) and letters.stand_at(name, 0))
    return _matcher(pattern, steps or Steps(), needs_end=True)


def start_matcher(pattern: str, steps: Steps | None = None) -> Matcher:
    """Tells whether the start of a name matches, as `re.match` does; see whole_matcher."""
    return _matcher(pattern, steps or Steps(), needs_end=False)


def end_matcher(pattern: str, steps: Steps | None = None) -> Matcher:
    """Tells whether a pattern matches the end of a name, whole parts of it between dots; or from "^" on its begin. See
    whole_matcher."""
    if not is_plain(pattern):
        _parse(pattern)  # says what is wrong with it alone
        if pattern.startswith("^"):
            return start_matcher(pattern, steps)
        return whole_matcher(rf"(?:.*\.)?(?:{pattern})", steps)
    letters = _Letters(pattern)

    def matches(name: str) -> bool:
        start = len(name) - len(letters)
        if pattern.startswith("^"):
            return (start == 0 or (start > 0 and not pattern.endswith("$"))) and letters.stand_at(name, 0)
        return (start == 0 or (start > 0 and name[start - 1] == ".")) and letters.stand_at(name, start)

    return _counted(steps, matches)


def is_plain(pattern: str) -> bool:
    """Whether a pattern is a name, whose dots may be escaped."""
    return _PLAIN.fullmatch(pattern) is not None


class _Letters:
    """The letters of a plain pattern; a dot that is not escaped is any."""

    def __init__(self, pattern: str) -> None:
        inner = pattern.removeprefix("^").removesuffix("$").replace("\\.", "\0")
        self._text = inner.replace("\0", ".")
        self._any = {place for place, letter in enumerate(inner) if letter == "."}

    def __len__(self) -> int:
        return len(self._text)

    def stand_at(self, name: str, start: int) -> bool:
        """Whether they are what a name has from a place on."""
        if name.startswith(self._text, start):
            return True
        piece = name[start : start + len(self._text)]
        return len(piece) == len(self._text) and all(
            letter == mine or (place in self._any and letter != "\n")
            for place, (letter, mine) in enumerate(zip(piece, self._text, strict=True))
        )


def _counted(steps: Steps | None, matches: Matcher) -> Matcher:
    counted = steps or Steps()

    def count(name: str) -> bool:
        counted.take()
        return matches(name)

    return count


def _parse(pattern: str) -> Any:
    try:
        compiled = re.compile(pattern)
        parsed = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if compiled.flags & ~re.UNICODE:
        raise ValueError("flags are not supported")
    return parsed


def _matcher(pattern: str, steps: Steps, *, needs_end: bool) -> Matcher:
    step = _sequence(_parse(pattern), 0)

    def matches(name: str) -> bool:
        found = step(_Name(name, steps), 1, False)
        return bool(found >> len(name) & 1) if needs_end else found != 0

    return matches


def _sequence(parts: Any, depth: int) -> Step:
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    steps = [_step(code, value, depth + 1) for code, value in parts]

    def run(name: _Name, places: int, back: bool) -> int:
        for step in reversed(steps) if back else steps:
            if not places:
                break
            places = step(name, places, back)
        return places

    return run


def _step(code: Any, value: Any, depth: int) -> Step:
    if code in _CHARACTERS:
        return _character(_items_of(code, value))
    if code is codes.BRANCH:
        return _branch([_sequence(part, depth) for part in value[1]])
    if code is codes.SUBPATTERN:
        if value[1] or value[2]:
            raise ValueError("flags are not supported")
        return _sequence(value[3], depth)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        least, most, of = value
        return _repeat(least, most, _sequence(of, depth))
    if code is codes.AT:
        return _kept(lambda name: _places_at(value, name.text), is_wanted=True)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        direction, of = value
        step = _sequence(of, depth)
        # A look-ahead holds where something matches on to any place; a look-behind where something ends.
        return _kept(lambda name: step(name, name.every, direction > 0), is_wanted=code is codes.ASSERT)
    raise ValueError(f"{str(code).lower()} is not supported")


def _items_of(code: Any, value: Any) -> Sequence[tuple[Any, Any]]:
    """As of a class of characters."""
    if code is codes.IN:
        return list(value)
    if code is codes.ANY:
        return [(codes.NEGATE, None), (codes.LITERAL, ord("\n"))]
    return [(codes.NEGATE, None)] * (code is codes.NOT_LITERAL) + [(codes.LITERAL, value)]


def _character(items: Sequence[tuple[Any, Any]]) -> Step:
    is_negated = any(kind is codes.NEGATE for kind, _ in items)
    literals = {chr(value) for kind, value in items if kind is codes.LITERAL}
    ranges = [value for kind, value in items if kind is codes.RANGE]
    categories = [_CATEGORIES[value] for kind, value in items if kind is codes.CATEGORY]
    known: dict[str, bool] = {}

    def fits(letter: str) -> bool:
        is_meant = known.get(letter)
        if is_meant is None:
            is_meant = (
                letter in literals
                or any(first <= ord(letter) <= last for first, last in ranges)
                or any(category(letter) for category in categories)
            )
            known[letter] = is_meant
        return is_meant != is_negated

    def find(name: _Name) -> int:
        return sum(1 << place for place, letter in enumerate(name.text) if fits(letter))

    def run(name: _Name, places: int, back: bool) -> int:
        name.steps.take()
        where = name.places(run, find)
        return (places >> 1) & where if back else (places & where) << 1

    return run


def _branch(steps: Sequence[Step]) -> Step:
    def run(name: _Name, places: int, back: bool) -> int:
        found = 0
        for step in steps:
            name.steps.take()
            found |= step(name, places, back)
        return found

    return run


def _repeat(least: int, most: int, step: Step) -> Step:
    def run(name: _Name, places: int, back: bool) -> int:
        # A name has as many places as letters and one more: after so many times nothing new comes.
        for _ in range(min(least, len(name.text) + 2)):
            name.steps.take()
            before, places = places, step(name, places, back)
            if places in (0, before):
                break
        found = new = places
        for _ in range(min(most - least, len(name.text) + 2)):
            name.steps.take()
            new = step(name, new, back) & ~found
            if not new:
                break
            found |= new
        return found

    return run


def _kept(find: Callable[[_Name], int], *, is_wanted: bool) -> Step:
    """Only places where something holds, which takes nothing of the name."""

    def run(name: _Name, places: int, back: bool) -> int:
        name.steps.take()
        holds = name.places(run, find)
        return places & (holds if is_wanted else ~holds)

    return run


def _places_at(where: Any, text: str) -> int:
    """Where an anchor holds, or a border of words."""
    if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
        return 1
    if where in (codes.AT_END, codes.AT_END_STRING):
        return 1 << len(text)
    of_word = [False, *map(_is_of_word, text), False]
    wanted = where is codes.AT_BOUNDARY
    return sum(1 << place for place in range(len(text) + 1) if (of_word[place] != of_word[place + 1]) == wanted)
