"""An option of another server: its spellings, and what it is here.

It knows no option; those are in serving_flags.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import click

Changes = dict[str, object]
"""Values by key of the YAML file, such as `speculation.draft_len`."""

Reader = Callable[[Any], object]

_MOST_DEVICES = 4096
"""Of one model: more are a slip of the finger."""


class Takes(IntEnum):
    """How many words follow a flag."""

    NONE = 0
    ONE = 1
    MANY = 2


@dataclass(frozen=True)
class Flag:
    """One option in all its spellings.

    Attributes:
        names: as documents have them; dashes and underscores mean the same.
        here: what it is here, for people: a key, or nothing.
        read: makes values of keys of what was given: a text, or a value of a file.
        takes: the words behind it.
        says: what is different here, why there is nothing to do, or what to do in its place.
        refuses: whether values are refused.
        allowed: but for these, of an option that refuses.
    """

    names: tuple[str, ...]
    here: str
    read: Callable[[Any], Changes]
    takes: Takes = Takes.ONE
    says: str = ""
    refuses: bool = False
    allowed: tuple[object, ...] = ()

    def change(self, name: str, given: Any) -> Changes:
        """What a value stands for.

        Args:
            name: as the user has written the option.
            given: its value: a text, a list of texts, or a flag.

        Raises:
            click.UsageError: it is refused, or cannot be read.
        """
        if self.refuses and given not in (None, False) and str(given).lower() not in map(str, self.allowed):
            shown = f" {given}" if self.allowed else ""  # a key is nothing to be shown
            raise click.UsageError(f"{name}{shown}: {self.says}")
        try:
            return self.read(given)
        except (ValueError, TypeError) as error:
            shown = given if isinstance(given, str) or not isinstance(given, Sequence) else " ".join(map(str, given))
            raise click.UsageError(f"{name} {shown}: {error}") from None


def becomes(key: str, *names: str, read: Reader | None = None, takes: Takes = Takes.ONE, says: str = "") -> Flag:
    """A flag that sets a key; a value that is read as None leaves the key as it is."""

    def change(given: Any) -> Changes:
        value = given if read is None else read(given)
        return {} if value is None else {key: value}

    return Flag(names, key, change, takes, says)


def spreads(here: str, *names: str, read: Callable[[Any], Changes], takes: Takes = Takes.ONE, says: str = "") -> Flag:
    """A flag that sets several keys."""
    return Flag(names, here, read, takes, says)


def idle(says: str, *names: str, takes: Takes = Takes.ONE) -> Flag:
    """A flag that there is nothing to do for."""
    return Flag(names, "", lambda _: {}, takes, says)


def only(allowed: tuple[object, ...], says: str, *names: str, takes: Takes = Takes.ONE) -> Flag:
    """A flag of which some values are what is so here in any case, and others are refused."""
    return Flag(names, "", lambda _: {}, takes, says, refuses=True, allowed=allowed)


def refused(says: str, *names: str, takes: Takes = Takes.ONE) -> Flag:
    """A flag that there is nothing like here."""
    return only((), says, *names, takes=takes)


def whole(given: Any) -> int:
    """A whole number, also as vLLM takes them: 32k is 32,000, 32K is 32,768.

    Raises:
        ValueError: it is none.
    """
    text = str(given).strip()
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)
    except (ValueError, OverflowError):  # the latter of what is infinite
        raise ValueError("write a whole number") from None


def context_length(given: Any) -> int | None:
    """Most tokens of a request; None where it is left to the model."""
    return None if str(given) in ("auto", "-1") else whole(given)


def fraction(given: Any) -> float:
    """A number.

    Raises:
        ValueError: it is none.
    """
    try:
        return float(given)
    except ValueError:
        raise ValueError("write a number, such as 0.9") from None


def devices(given: Any) -> list[int | str]:
    """So many devices of this host; CPU slots where it has no GPU."""
    from launch.jobs.plan.proposal import count_granted  # which reads models: no command line needs it before

    if not 1 <= whole(given) <= _MOST_DEVICES:
        raise ValueError(f"write a number of devices, 1 to {_MOST_DEVICES}")
    numbers = range(whole(given))
    return list(numbers) if count_granted() else [f"cpu:{number}" for number in numbers]


def one_of(names: Mapping[str, object]) -> Reader:
    """A reader of values that have other names here.

    Args:
        names: ours, by theirs.
    """

    def read(given: Any) -> object:
        if given not in names:
            raise ValueError(f"write one of {', '.join(names)}")
        return names[given]

    return read


def read_object(given: Any) -> dict[str, Any]:
    """An object of JSON, or a mapping that is one.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError('write an object of JSON, such as \'{"model": "…"}\'')
    return found
