"""Adapters by name, as rank 0 knows them: which slot each has, and which requests go on with it.

A name that is dropped is not found by new requests; its slot is free once the last of those that have it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from itertools import count

from trtrun.core.nouns import LoadedAdapter
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError, nearest
from trtrun.kvcache.prefix_cache import DIGEST_BYTES

_LISTED = 20
"""Names that a message lists."""


class AdapterTable:
    """The adapters and their slots.

    Args:
        names: of those that are loaded at the start, in the order of their slots.
        num_slots: for all.
    """

    def __init__(self, names: Iterable[str], num_slots: int) -> None:
        self._loads = count()
        self._num_slots = num_slots
        self._by_name: dict[str, LoadedAdapter] = {}
        for slot, name in enumerate(names, start=1):
            self.enter(name, slot)

    @property
    def names(self) -> list[str]:
        """Names that requests may give."""
        return list(self._by_name)

    def find_slot(self, name: str, in_use: Collection[int]) -> int:
        """A slot for a name that is to be loaded.

        Args:
            name: of the adapter.
            in_use: slots that requests have, whose adapters may have been dropped.

        Raises:
            InvalidRequestError: it is no name, there is one of that name, or no slot is free.
        """
        if not isinstance(name, str) or not name.isprintable() or not name or name != name.strip():
            raise InvalidRequestError(f"lora_name must be a name of one line, not {show_value(name)}")
        if name in self._by_name:
            raise InvalidRequestError(f"lora_name {show_value(name)} is loaded: drop it first, or give another name")
        taken = {adapter.slot for adapter in self._by_name.values()}.union(in_use)
        free = next((slot for slot in range(1, self._num_slots + 1) if slot not in taken), None)
        if free is None:
            raise InvalidRequestError(
                f"no slot is free: adapter_slots.max_loaded is {self._num_slots}, and so many are loaded or in use: "
                "drop one, and let its requests end"
            )
        return free

    def enter(self, name: str, slot: int) -> None:
        """A name has a slot from now on, which is filled on all ranks."""
        key = blake2b(f"{next(self._loads)} {name}".encode(), digest_size=DIGEST_BYTES).digest()
        self._by_name[name] = LoadedAdapter(name, slot, key)

    def drop(self, name: str) -> None:
        """Requests that come may not have the name any more; those that have it go on.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        check_adapter(name, self._by_name)
        del self._by_name[name]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a request; None for the base model.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        if name is None:
            return None
        check_adapter(name, self._by_name)
        return self._by_name[name]


def check_adapter(name: str | None, known: Iterable[str]) -> None:
    """Refuse a name of an adapter that is not loaded; None is the base model.

    Raises:
        InvalidRequestError: it is not.
    """
    names = list(known)
    if name is None or name in names:
        return
    if not names:
        raise InvalidRequestError(
            f"lora_name: no adapters are loaded here, and so not {show_value(name)}: leave it out"
        )
    raise InvalidRequestError(f"lora_name: there is no adapter {show_value(name)}{nearest(name, names[:_LISTED])}")
