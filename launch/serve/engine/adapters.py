"""Adapters that the engine has to have: those of the configuration, and what was loaded and dropped since.

An engine that is started again has those of the configuration; it is told the rest before it gets the requests that go
on. An adapter that was dropped while requests have it is loaded once more for them, and dropped when they are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch.serve.engine.messages import DropAdapter, LoadAdapter
from trtrun.lora.lora_config import hash_adapter_files

AdapterChange = LoadAdapter | DropAdapter

_MOST_LOST = 2
"""Engines that are lost, one after the other, while they load the same adapter again: one may be lost by chance."""


@dataclass(frozen=True)
class _Source:
    """The directory that an adapter was loaded from, and what its files were then."""

    path: Path
    files: str

    def message(self, name: str) -> LoadAdapter:
        return LoadAdapter(lora_name=name, path=str(self.path))


@dataclass
class AdapterRegistry:
    """Adapters by name.

    Attributes:
        configured: of the configuration.
        offered: those that requests may ask for; None where they are of the configuration.
        dropped: those that requests may still have, though nobody may ask for them.
        lingering: of these, those that the engine has by their name, as it was started again for their requests.
    """

    configured: tuple[str, ...] = ()
    offered: dict[str, _Source | None] = field(default_factory=dict)
    dropped: dict[str, _Source | None] = field(default_factory=dict)
    lingering: set[str] = field(default_factory=set)
    _lost_at: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> AdapterRegistry:
        """Make the registry of a configuration."""
        return cls(tuple(names), dict.fromkeys(names))

    def copy(self) -> AdapterRegistry:
        """The same for another engine, which has none of them but those of the configuration."""
        return AdapterRegistry(self.configured, dict(self.offered), dict(self.dropped))

    @property
    def names(self) -> list[str]:
        """Names that requests may ask for."""
        return list(self.offered)

    def enter(self, change: AdapterChange) -> None:
        """The engine has loaded an adapter, or forgotten it."""
        name = change.lora_name
        if isinstance(change, LoadAdapter):
            path = Path(change.path)
            self.offered[name] = _Source(path, hash_adapter_files(path))
            self.dropped.pop(name, None)
        else:
            self.dropped[name] = self.offered.pop(name, None)

    def clear(self, in_use: Collection[str]) -> list[DropAdapter]:
        """What the engine should forget now, which it will; `in_use` are names that requests have."""
        over = [name for name in self.dropped if name not in in_use]
        found = [DropAdapter(lora_name=name) for name in over if name in self.lingering]
        for name in over:
            self.forget(name)
        return found

    def changes(self, in_use: Collection[str]) -> Iterator[AdapterChange]:
        """What an engine that has just been started needs before requests; `in_use` are names that these have.

        Files that are others than when they were loaded are left out: texts would go on with other weights.
        """
        self.lingering = {name for name in self.dropped if name in in_use}
        wanted = {**self.offered, **{name: self.dropped[name] for name in self.lingering}}
        for name in self.configured:
            if wanted.get(name, _GONE) is not None:
                yield DropAdapter(lora_name=name)
        for name, source in wanted.items():
            if source is None:
                continue
            if hash_adapter_files(source.path) == source.files:
                yield source.message(name)
            else:
                self.forget(name)

    def note_loaded(self, name: str) -> None:
        """An engine that was started again has answered for it."""
        self._lost_at.pop(name, None)

    def give_up(self, name: str, *, at_once: bool) -> bool:
        """An engine was lost while it loaded an adapter again: the next one is not to try it where that was `at_once`
        known to be what held it up, or for the second time; whether it is forgotten so."""
        self._lost_at[name] = self._lost_at.get(name, 0) + 1
        if not at_once and self._lost_at[name] < _MOST_LOST:
            return False
        self.note_loaded(name)
        self.forget(name)
        return True

    def forget(self, name: str) -> None:
        """The engine does not have it."""
        for names in (self.offered, self.dropped):
            names.pop(name, None)
        self.lingering.discard(name)


_GONE = _Source(Path(), "")
