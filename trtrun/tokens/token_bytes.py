"""The bytes that each token of a vocabulary stands for, which are all that two tokenizers can be compared by; and the
tokens that two vocabularies have in common: those with the same bytes, and special ones that mean the same.

It knows the decoders of byte-level vocabularies (GPT-2's, Llama 3's, Qwen's) and of SentencePiece's.

Source of drafting within the intersection: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", arXiv:2502.05202.
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
        """The number of tokens that stand for something, special ones among them."""
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


@dataclass(frozen=True)
class CommonTokens:
    """Tokens of a target and of a draft that stand for the same; each is there once at most.

    Attributes:
        draft_of: of each common token of the target, the draft's.
        num_target, num_draft: tokens of each vocabulary, without a model's padding.
        ends: of the target's tokens that end a text, and that the draft does not have, what does so there.
    """

    draft_of: Mapping[int, int]
    num_target: int
    num_draft: int
    ends: Mapping[int, int]

    @property
    def share_of_target(self) -> float:
        """0 to 1."""
        return len(self.draft_of) / max(1, self.num_target)

    @property
    def share_of_draft(self) -> float:
        """0 to 1."""
        return len(self.draft_of) / max(1, self.num_draft)


def find_common_tokens(
    target: TokenBytes, draft: TokenBytes, target_ends: Sequence[int] = (), draft_ends: Sequence[int] = ()
) -> CommonTokens:
    """Match two vocabularies.

    A byte that one has as a token of a byte-level vocabulary, and the other to fall back to, is the same byte. Where a
    vocabulary has both, as SentencePiece's has `A` and `<0x41>`, like goes with like, and the piece with what is left.

    Args:
        target, draft: the vocabularies.
        target_ends, draft_ends: of each, tokens that end a text, the usual one first.
    """
    draft_of: dict[int, int] = {}
    if target.fallbacks and draft.fallbacks:
        known = {draft.of_token[token]: token for token in sorted(draft.fallbacks, reverse=True)}
        draft_of |= _matched({token: target.of_token[token] for token in target.fallbacks}, known)
        sides = [{t: b for t, b in side.of_token.items() if t not in side.fallbacks} for side in (target, draft)]
        draft_of |= _matched(sides[0], _by_bytes(sides[1], frozenset()))
    else:
        draft_of |= _matched(_first_by_bytes(target), _by_bytes(draft.of_token, draft.fallbacks))
    by_name = {name: token for token, name in sorted(draft.special.items(), reverse=True)}
    for token, name in target.special.items():
        if name in by_name:
            draft_of[token] = by_name[name]
    taken = {*draft_of.values()}
    free = [token for token in draft_ends if token not in taken]
    first = next((token for token in target_ends if token not in draft_of), None)
    if free and first is not None and not any(token in draft_of for token in target_ends):
        draft_of[first] = free[0]
    lacking = [token for token in target_ends if token not in draft_of]
    ends = dict.fromkeys(lacking, draft_ends[0]) if draft_ends else {}
    return CommonTokens(draft_of, target.num_tokens, draft.num_tokens, ends)


def _matched(target: Mapping[int, bytes], known: Mapping[bytes, int]) -> dict[int, int]:
    """Each token of the draft goes with the first of the target's."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    for token in sorted(target):
        other = known.get(target[token])
        if other is not None and other not in taken:
            found[token] = other
            taken.add(other)
    return found


def _by_bytes(texts: Mapping[int, bytes], later: frozenset[int]) -> dict[bytes, int]:
    """The first token for each text; one of `later` only where there is no other."""
    found: dict[bytes, int] = {}
    for token in sorted(texts, key=lambda token: (token in later, token)):
        found.setdefault(texts[token], token)
    return found


def _first_by_bytes(vocabulary: TokenBytes) -> dict[int, bytes]:
    """The token of each text: of several, the one that is no fallback, or the first."""
    return {token: data for data, token in _by_bytes(vocabulary.of_token, vocabulary.fallbacks).items()}
