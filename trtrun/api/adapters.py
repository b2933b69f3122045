"""Adapters by name, as rank 0 knows them: which slot each has, and which requests go on with it.

A name that is dropped is not found by new requests; its slot is free once the last of those that have it has ended. It
knows names, slots and counts. It does not know files, tensors or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import count

from trtrun.core.nouns import LoadedAdapter
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError, nearest
from trtrun.kvcache.blocks import DIGEST_BYTES

_LISTED = 20
"""Names that a message lists."""


class AdapterTable:
    """Who is in which slot.

    Args:
        names: of those that are loaded at the start, in the order of their slots.
        num_slots: for all.
    """

    def __init__(self, names: Iterable[str], num_slots: int) -> None:
        self._loads = count()
        self._free = list(range(num_slots, 0, -1))
        self._by_name: dict[str, LoadedAdapter] = {}
        for name in names:
            self.enter(name)

    @property
    def names(self) -> list[str]:
        """Those that requests may name."""
        return list(self._by_name)

    def enter(self, name: str) -> LoadedAdapter:
        """Give a name the first free slot, which there is."""
        slot, load = self._free.pop(), next(self._loads)
        key = blake2b(f"{load} {name}".encode(), digest_size=DIGEST_BYTES).digest()
        found = self._by_name[name] = LoadedAdapter(name, slot, key)
        return found

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
        raise InvalidRequestError(f"lora_name is {show_value(name)}, but no adapters are loaded here: leave it out")
    raise InvalidRequestError(f"unknown lora_name {show_value(name)}{nearest(name, names[:_LISTED])}")
