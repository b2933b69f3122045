"""What parsers find in a chat's text: thoughts, text, and calls piece by piece. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
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
    """The same with neighbours of one kind as one, and without empty ones."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallBegin):
            found.append(event)
        elif not event.text:
            continue
        elif isinstance(last, type(event)):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found
