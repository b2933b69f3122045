"""Steps of a decoder on one growing text, which comes in pieces: joined bytes, and what is done behind a join.

Each gives what is certain of the result.

Source: huggingface/tokenizers, in tokenizers/src: decoders, pre_tokenizers/byte_level.rs, normalizers/replace.rs.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from copy import copy
from typing import Self

from typing_extensions import override

from trtrun.tokens.decoders.elements import Step


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies: its own where that is printable."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_SPELLINGS = {byte: character for character, byte in _ALPHABET.items()}


class JoinedBytes(Step):
    """Strings spell bytes, and these are UTF-8 together (ByteLevel): what may become a character is kept."""

    def __init__(self) -> None:
        """Begin without bytes."""
        self._kept = b""

    @override
    def feed(self, elements: list[str]) -> list[str]:
        data = self._kept + b"".join(map(spelled_bytes, elements))
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._kept = data[num_read:]
        return [text] if text else []

    @override
    def close(self, element: str) -> list[str]:
        first = spelled_bytes(element)[:1]
        if not self._kept or not first:
            return []
        text, _ = codecs.utf_8_decode(self._kept + first, "replace", False)
        if not text or text.encode() == self._kept + first:
            return []
        found, self._kept = self.rest(), b""
        return found

    @override
    def rest(self) -> list[str]:
        return [self._kept.decode(errors="replace")] if self._kept else []

    @override
    def anchor(self, element: str) -> str | None:
        # A byte that continues a character tells nothing of where the next one begins; all others do.
        spelled = spelled_bytes(element)
        return element if any(byte & 0xC0 != 0x80 for byte in spelled) else None

    @property
    @override
    def is_neutral(self) -> bool:
        return not self._kept


def spell_bytes(data: bytes) -> str:
    """What byte-level vocabularies write for bytes."""
    return data.decode("latin-1").translate(_SPELLINGS)


def spelled_bytes(element: str) -> bytes:
    """The bytes of a token; one that is no spelling of bytes, such as an added one, is itself."""
    try:
        return bytes([_ALPHABET[character] for character in element])
    except KeyError:
        return element.encode()


class Stripped(Step):
    """A few characters are cut off at both ends of the text (Strip)."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        """Take the character, and how many are cut off at most at the start and at the end."""
        self._content, self._left, self._stop = content, start, stop
        self._num_kept = 0
        self.is_settled = not start

    @override
    def feed(self, elements: list[str]) -> list[str]:
        text = "".join(elements)
        if not self.is_settled and text:
            stripped = len(text) - len(text.lstrip(self._content))
            num_cut = min(self._left, stripped)
            text = text[num_cut:]
            self._left -= num_cut
            self.is_settled = bool(text) or not self._left
        if self._stop:
            text = self._content * self._num_kept + text
            self._num_kept = min(self._stop, len(text) - len(text.rstrip(self._content)))
            text = text[: len(text) - self._num_kept]
        return [text] if text else []

    @override
    def anchor(self, element: str) -> str | None:
        return None if self._stop else element

    @property
    @override
    def is_neutral(self) -> bool:
        return self.is_settled and not self._num_kept


class Replaced(Step):
    """A string becomes another one wherever it is in the text (Replace); its beginning is kept."""

    def __init__(self, pattern: str, content: str) -> None:
        """Take the string, which is not empty, and what it becomes."""
        self._pattern, self._content = pattern, content
        self._kept = ""

    @override
    def feed(self, elements: list[str]) -> list[str]:
        *parts, end = (self._kept + "".join(elements)).split(self._pattern)
        size = min(len(self._pattern) - 1, len(end))
        while size and not self._pattern.startswith(end[len(end) - size :]):
            size -= 1
        self._kept = end[len(end) - size :]
        text = "".join([part + self._content for part in parts]) + end[: len(end) - size]
        return [text] if text else []

    @override
    def rest(self) -> list[str]:
        return [self._kept] if self._kept else []

    @override
    def anchor(self, element: str) -> str | None:
        return None

    @property
    @override
    def is_neutral(self) -> bool:
        return not self._kept


class Withheld(Step):
    """What the library alone can do, of which nothing is certain before the end: all is kept, once."""

    is_settled = False

    def __init__(self, decode: Callable[[list[str]], str], is_joined: bool) -> None:
        """Take what makes a text of all strings, and whether these are pieces of one."""
        self._decode, self._is_joined = decode, is_joined
        self._kept: list[str] = []

    @override
    def feed(self, elements: list[str]) -> list[str]:
        self._kept += elements
        return []

    @override
    def rest(self) -> list[str]:
        return [self._decode(["".join(self._kept)] if self._is_joined else self._kept)]

    @property
    @override
    def is_neutral(self) -> bool:
        return False

    @override
    def copied(self) -> Self:
        other = copy(self)
        other._kept = self._kept[:]
        return other
