"""What parsers find in a chat's text: thoughts, text, and calls piece by piece. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple


class Text(NamedTuple):
    """Some of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Some of what the model thinks."""

    text: str


class CallBegin(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """Some of the arguments of the call that has begun last, as JSON."""

    text: str


Event = Text | Reasoning | CallBegin | Arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind as one, and without empty ones. In time in proportion to their texts."""
    found: list[Event] = []
    for kind, of_kind in groupby((event for event in events if isinstance(event, CallBegin) or event.text), type):
        if kind is CallBegin:
            found += of_kind
        else:
            found.append(kind("".join(event.text for event in of_kind)))  # type: ignore[union-attr]
    return found
