"""Steps of a decoder that give strings for strings: each token's, until something joins them.

Each step does what the decoder of the same kind in `tokenizers` does with all strings at once, with those that come,
and gives what is certain of the result.

Source: huggingface/tokenizers, tokenizers/src/decoders and src/pre_tokenizers/metaspace.rs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from itertools import groupby, product
from string import hexdigits
from typing import Self

from typing_extensions import override

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) UTF-8."""

BYTES = {
    f"<0x{first}{second}>": int(first + second, 16)
    for first, second in product("+" + hexdigits, hexdigits)  # with all that the library reads as a number
}
"""The bytes that strings stand for where bytes are tokens of their own."""


class Step(ABC):
    """A step of a decoder, with what it remembers of what it was given.

    Attributes:
        is_settled: whether it is past the beginning, which some steps write in another way than what follows.
    """

    is_settled: bool = True

    @abstractmethod
    def feed(self, elements: list[str]) -> list[str]:
        """Take the next strings; returns those that are now certain."""

    def close(self, element: str) -> list[str]:
        """What a string makes certain of those before it; it is fed next."""
        return []

    def rest(self) -> list[str]:
        """What follows if no more strings come. Changes nothing."""
        return []

    def anchor(self, element: str) -> str | None:
        """What a settled step gives for a string behind which it stands alike whatever came before; None where that
        depends on what came."""
        return None

    @property
    def is_neutral(self) -> bool:
        """Whether what comes next is written alike whatever came before."""
        return self.is_settled

    def settle(self) -> None:
        """Stand behind the beginning."""
        self.is_settled = True

    def copied(self) -> Self:
        """Make a copy that goes on by itself."""
        # `copy` asks for ways to copy that nothing here has, and takes five times as long.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


class Mapped(Step):
    """Each string becomes another one; the first one may in another way (Metaspace, WordPiece, Replace, Strip)."""

    def __init__(self, later: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        """Take what becomes of a string, and of the first one."""
        self._later, self._first = later, first or later
        self.is_settled = first is None

    @override
    def feed(self, elements: list[str]) -> list[str]:
        if self.is_settled or not elements:
            return list(map(self._later, elements))
        self.is_settled = True
        return [self._first(elements[0]), *map(self._later, elements[1:])]

    @override
    def anchor(self, element: str) -> str | None:
        return self._later(element)


class Deduplicated(Step):
    """Strings that follow their like are left out, and what becomes of the others where that is nothing (CTC)."""

    def __init__(self, later: Callable[[str], str]) -> None:
        """Take what becomes of a string."""
        self._later = later
        self._last: str | None = None

    @override
    def feed(self, elements: list[str]) -> list[str]:
        found = []
        for element in elements:
            if element != self._last:
                self._last = element
                found.append(self._later(element))
        return list(filter(None, found))

    @override
    def anchor(self, element: str) -> str | None:
        return self._later(element) or None

    @property
    @override
    def is_neutral(self) -> bool:
        return self._last is None


class LastApart(Step):
    """The last string is written in another way than those before it, so one is kept (BPEDecoder)."""

    def __init__(self, later: Callable[[str], str], last: Callable[[str], str]) -> None:
        """Take what becomes of a string that another one follows, and of the last one."""
        self._later, self._last = later, last
        self._kept: str | None = None

    @override
    def feed(self, elements: list[str]) -> list[str]:
        if not elements:
            return []
        found = [*self.close(elements[0]), *map(self._later, elements[:-1])]
        self._kept = elements[-1]
        return found

    @override
    def close(self, element: str) -> list[str]:
        kept, self._kept = self._kept, None
        return [] if kept is None else [self._later(kept)]

    @override
    def rest(self) -> list[str]:
        return [] if self._kept is None else [self._last(self._kept)]

    @property
    @override
    def is_neutral(self) -> bool:
        return self._kept is None


class BytesAsTokens(Step):
    """Strings such as <0xE6> are bytes (ByteFallback). Those that follow each other are UTF-8 together or none of them
    is, so they are kept until another string ends them: a byte that makes no character unmakes those before it."""

    def __init__(self) -> None:
        """Begin without bytes."""
        self._bytes = bytearray()
        # Of them, those that are known to make whole characters, if nothing unmakes them, and how many characters.
        self._num_sound, self._num_characters, self._is_sound = 0, 0, True

    @override
    def feed(self, elements: list[str]) -> list[str]:
        found: list[str] = []
        for is_byte, run in groupby(elements, BYTES.__contains__):
            if is_byte:
                self._bytes += bytes(map(BYTES.__getitem__, run))
            else:
                found += [*self._end_run(), *run]
        return found

    @override
    def close(self, element: str) -> list[str]:
        return [] if element in BYTES else self._end_run()

    def _end_run(self) -> list[str]:
        if not self._bytes:
            return []
        found = self.rest()
        self._bytes = bytearray()
        self._num_sound, self._num_characters, self._is_sound = 0, 0, True
        return found

    @override
    def rest(self) -> list[str]:
        try:
            return [self._bytes.decode()] if self._bytes else []
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(self._bytes)

    def num_characters(self) -> int:
        """Characters that the bytes make so far, without one that is not whole. Looks at new bytes only."""
        try:
            self._num_characters += len(self._bytes[self._num_sound :].decode())
            self._num_sound = len(self._bytes)
        except UnicodeDecodeError as error:
            self._is_sound = self._is_sound and error.reason == "unexpected end of data"
            if self._is_sound:
                self._num_characters += len(self._bytes[self._num_sound : self._num_sound + error.start].decode())
                self._num_sound += error.start
        return self._num_characters if self._is_sound else len(self._bytes)

    def first_characters(self, num_bytes: int) -> list[str]:
        """The counted characters of the first bytes, as strings that this step may give."""
        if not self._is_sound:
            return [REPLACEMENT] * min(num_bytes, len(self._bytes))
        return [self._bytes[:num_bytes].decode(errors="ignore")]

    @override
    def anchor(self, element: str) -> str | None:
        return None if element in BYTES else element

    @property
    @override
    def is_neutral(self) -> bool:
        return not self._bytes

    @override
    def copied(self) -> Self:
        other = copy(self)
        other._bytes = self._bytes[:]
        return other
