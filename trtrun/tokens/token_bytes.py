"""What each token of a vocabulary stands for, in bytes: the one thing that two tokenizers can be compared by.

It knows the decoders of byte-level vocabularies (GPT-2's, Llama 3's, Qwen's) and of SentencePiece's. It does not know
texts, nor a second vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtrun.tokens.decoders.elements import BYTES
from trtrun.tokens.decoders.texts import spelled_bytes


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary.

    Attributes:
        of_token: of each token that stands for text, its bytes.
        special: of each special token its name, which is no text.
        fallbacks: those of `of_token` that stand for a byte of a character that the vocabulary lacks (`<0x0A>`).
        opens_with_space: whether the first token of a text has a space in front that is not the text's.
    """

    of_token: Mapping[int, bytes]
    special: Mapping[int, str]
    fallbacks: frozenset[int] = frozenset()
    opens_with_space: bool = False

    @property
    def num_tokens(self) -> int:
        """Those that stand for something, special ones among them."""
        return len(self.of_token) + len(self.special)


def read_token_bytes(
    decoder: Sequence[Mapping[str, Any]],
    vocabulary: Mapping[str, int],
    added: Mapping[int, str],
    special: Mapping[int, str],
) -> TokenBytes | None:
    """Tell the bytes of each token from the tokenizer's decoder.

    Args:
        decoder: its steps, as tokenizer.json has them.
        vocabulary: string to id, added tokens included.
        added: strings of added tokens that stand for text as they are.
        special: strings of those that stand for none.

    Returns:
        None where the decoder is of another kind.
    """
    kinds = [step["type"] for step in decoder]
    if kinds == ["ByteLevel"]:
        texts = {token: spelled_bytes(name) for name, token in vocabulary.items() if token not in added}
        return TokenBytes(_ordinary(texts, added, special), dict(special))
    space = next((mark for step in decoder if (mark := _space_mark(step)) is not None), None)
    if space is None or not {*kinds} <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return None
    is_fallback = {token for name, token in vocabulary.items() if name in BYTES} if "ByteFallback" in kinds else set()
    texts = {
        token: bytes([BYTES[name]]) if token in is_fallback else name.replace(space, " ").encode()
        for name, token in vocabulary.items()
    }
    opens = any(map(_drops_first_space, decoder))
    fallbacks = frozenset(is_fallback - added.keys() - special.keys())
    return TokenBytes(_ordinary(texts, added, special), dict(special), fallbacks, opens)


def _ordinary(texts: Mapping[int, bytes], added: Mapping[int, str], special: Mapping[int, str]) -> dict[int, bytes]:
    known = {**texts, **{token: name.encode() for token, name in added.items()}}
    return {token: data for token, data in known.items() if token not in special and data}


def _space_mark(step: Mapping[str, Any]) -> str | None:
    """What stands for a space; None where this step does not say so."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        mark = step["pattern"].get("String")
        return None if mark is None else str(mark)
    return None


def _drops_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
