"""Which tokens two vocabularies have in common: those with the same bytes, and special ones that mean the same.

It knows what tokens stand for. It does not know texts, nor what is done with the common ones.

Source of drafting within the intersection: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", arXiv:2502.05202.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtrun.tokens.token_bytes import TokenBytes


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
    """Of tokens for the same text the one that is no fallback, or the first."""
    return {token: data for data, token in _by_bytes(vocabulary.of_token, vocabulary.fallbacks).items()}
