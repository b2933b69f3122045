"""Named implementations behind one interface: a new one is a new file that registers itself under its name.

`MODEL_FAMILIES` maps the architecture name of a config.json to its family. Other layers make their own `Registry`
(attention backends, drafters, quantizations). This module knows none of the things it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from trtrun.errors import ConfigError, TrtrunError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind by name.

    Args:
        kind: what the names stand for, for messages, such as "architecture".
        error: class of the error for an unknown name.
        advice: how to have what is not among the names, for that error.
    """

    def __init__(self, kind: str, error: type[TrtrunError] = ConfigError, advice: str = "") -> None:
        self.kind, self._advice = kind, f"; {advice}" if advice else ""
        self._error = error
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that stores the decorated object under `name`.

        Raises:
            ValueError: the name is taken (a defect, not a user's error).
        """

        def store(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._items[name] = item
            return item

        return store

    def get(self, name: str) -> T:
        """The implementation called `name`.

        Raises:
            TrtrunError: of the registry's error class; unknown name, with the nearest known one and the known names.
        """
        if name not in self._items:
            known = ", ".join(self.names())
            hint = nearest(name, self._items)
            hint = "" if hint.startswith(" (known") else hint
            raise self._error(f"unknown {self.kind} '{name}'{hint}; known: {known}{self._advice}")
        return self._items[name]

    def names(self) -> list[str]:
        """Known names, sorted."""
        return sorted(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


# Values are trtrun.models.config.ModelFamily, which this module, being lower, cannot name.
MODEL_FAMILIES: Registry[Any] = Registry("architecture")
