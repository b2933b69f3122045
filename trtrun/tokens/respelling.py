"""Makes tokens of bytes, as a tokenizer would make them of the text, wherever in a text the bytes stand."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from trtrun.tokens.text import Tokenizer
from trtrun.tokens.token_bytes import TokenBytes

_ANCHORS = ("\n", "a")
"""What stands in front of a text that goes on with another: tokenizers write the beginning of a text in another way.
Hardly any token begins with a line's end, or with a letter and what follows no word."""

_BEGIN_BYTES = 2
"""Bytes of a piece by which it is looked for."""

_RUNS = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")
"""Bytes that are no characters, as they are decoded, and characters."""


class Respeller:
    """Bytes to tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: TokenBytes) -> None:
        """Spell with `tokenizer`, whose tokens stand for what `vocabulary` says.

        Attributes:
            opening: tokens that the tokenizer puts in front of a text.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        with_opening, without = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        places = range(len(with_opening) - len(without) + 1)
        begin = next((place for place in places if with_opening[place : place + len(without)] == without), 0)
        self.opening: tuple[int, ...] = tuple(with_opening[:begin])
        self._pieces: dict[bytes, int] | None = None
        self._lengths: dict[bytes, list[int]] = {}

    def spell(self, data: bytes, *, is_start: bool = False) -> list[int]:
        """Tokens that stand for `data`; special ones are not among them, and what the vocabulary lacks is left out.

        Args:
            data: any bytes; those that are no characters are spelled one by one.
            is_start: whether a text begins with them.
        """
        tokens: list[int] = []
        for part, text in _parts(data):
            tokens += self._pieces_of(part) if text is None else self._of_text(text, part, is_start and not tokens)
        return tokens

    def num_bytes(self, token: int) -> int:
        """The number of bytes that a token stands for."""
        return len(self._vocabulary.of_token.get(token, b""))

    def _of_text(self, text: str, data: bytes, is_start: bool) -> list[int]:
        if is_start:
            found = self._behind(self._encode(text), b"", data, keeps_space=True)
            return self._pieces_of(data) if found is None else found
        for anchor in _ANCHORS:
            found = self._behind(self._encode(anchor + text), anchor.encode(), data)
            if found is not None:
                return found
        return self._pieces_of(data)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _behind(
        self, tokens: Sequence[int], anchor: bytes, data: bytes, *, keeps_space: bool = False
    ) -> list[int] | None:
        """Tokens of `tokens` that stand for `data` behind `anchor`; None where they stand for something else, or a
        token for both. A space that is not the text's may stand in front, and is left there with `keeps_space`."""
        texts = [self._vocabulary.of_token.get(token, b"") for token in tokens]
        whole = b"".join(texts)
        if not all(texts) or not whole.endswith(anchor + data) or whole not in (anchor + data, b" " + anchor + data):
            return None
        left = 0 if keeps_space else len(whole) - len(data)
        for place, text in enumerate(texts):
            if left <= 0:
                return list(tokens[place:]) if not left else None
            left -= len(text)
        return None if left else []

    def _pieces_of(self, data: bytes) -> list[int]:
        """The longest token at each place; a byte with which none begins is left out."""
        if self._pieces is None:
            ranked = sorted(self._vocabulary.of_token.items(), key=lambda item: item[0] in self._vocabulary.fallbacks)
            self._pieces = {}
            for token, text in ranked:
                self._pieces.setdefault(text, token)
            self._lengths = _lengths_by_begin(self._pieces)
        tokens, place = [], 0
        while place < len(data):
            lengths = self._lengths.get(data[place : place + _BEGIN_BYTES], ())
            length = next((length for length in (*lengths, 1) if data[place : place + length] in self._pieces), 0)
            if length:
                tokens.append(self._pieces[data[place : place + length]])
            place += max(1, length)
        return tokens


def _lengths_by_begin(pieces: Iterable[bytes]) -> dict[bytes, list[int]]:
    """Lengths above 1 of pieces that begin with the same bytes, longest first."""
    found: defaultdict[bytes, set[int]] = defaultdict(set)
    for piece in pieces:
        if len(piece) > 1:
            found[piece[:_BEGIN_BYTES]].add(len(piece))
    return {begin: sorted(lengths, reverse=True) for begin, lengths in found.items()}


def _parts(data: bytes) -> Iterator[tuple[bytes, str | None]]:
    """Stretches of whole characters with their text, and bytes between them that are none."""
    # At once: where each bad byte began another attempt, a long text of them would take time by its square.
    for part in _RUNS.findall(data.decode(errors="surrogateescape")):
        is_text = not "\udc80" <= part[0] <= "\udcff"
        yield (part.encode(), part) if is_text else (part.encode(errors="surrogateescape"), None)


def whole_characters(data: bytes) -> bytes:
    """`data` without the beginning of a character at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return data[:-back] if length > back else data
    return data
