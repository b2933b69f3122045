"""The vocabularies of a target and a draft, read from their directories, and how drafts get from one to the other.

It knows tokenizers. It does not know the configuration or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trtrun.errors import CheckpointError
from trtrun.tokens.common_tokens import find_common_tokens
from trtrun.tokens.respelling import Respeller
from trtrun.tokens.text import Tokenizer, hash_tokenizer_files, read_tokenizer
from trtrun.tokens.token_bytes import TokenBytes
from trtrun.tokens.translation import Vocabularies

Way = Literal["same", "intersection", "text"]

_LARGE_SHARE = 0.5
"""Of the target's tokens, from which the draft chooses among the common ones: the rest could never be proposed."""


def choose_way(target: Path, draft: Path) -> Way:
    """How a draft's tokens become the target's, by what the directories of their tokenizers hold: as they are where the
    vocabularies are the same, or one is not there; as what both have in common where that is much; or as text.

    Tokenizers that are damaged, or that cannot be matched, count as the same: `check_same_tokenizer` says of them what
    is wrong.
    """
    hashes = {hash_tokenizer_files(target), hash_tokenizer_files(draft)}
    if len(hashes) == 1 or "none" in hashes:
        return "same"
    try:
        tokenizers = read_tokenizer(target), read_tokenizer(draft)
        if None in tokenizers or _are_same(*tokenizers):
            return "same"
        vocabularies = read_vocabularies(target, draft)
    except CheckpointError:
        return "same"
    return "intersection" if vocabularies.common.share_of_target >= _LARGE_SHARE else "text"


def read_vocabularies(
    target: Path, draft: Path, target_ends: Sequence[int] = (), draft_ends: Sequence[int] = ()
) -> Vocabularies:
    """Read and match two vocabularies.

    Args:
        target, draft: directories of the tokenizers.
        target_ends, draft_ends: of each, tokens that end a text, the usual one first.

    Raises:
        CheckpointError: a tokenizer is missing or damaged, or cannot be matched; one line.
    """
    hashes = hash_tokenizer_files(target), hash_tokenizer_files(draft)
    (of_target, target_speller), (of_draft, draft_speller) = _read_both(target, draft, hashes)
    common = find_common_tokens(of_target, of_draft, target_ends, draft_ends)
    return Vocabularies(of_target, of_draft, common, target_speller, draft_speller)


@lru_cache(maxsize=1)
def _read_both(target: Path, draft: Path, hashes: tuple[str, str]) -> list[tuple[TokenBytes, Respeller]]:
    """Once for the contents of files, which `hashes` stand for: a start needs them several times."""
    found: list[tuple[TokenBytes, Respeller]] = []
    for path, role in ((target, "target"), (draft, "draft")):
        tokenizer = read_tokenizer(path)
        if tokenizer is None:
            raise CheckpointError(
                f"{path} has no tokenizer (tokenizer.json), so target and draft tokens cannot be matched: copy the "
                f"{role}'s there, or set draft.vocabulary to same where both have one vocabulary"
            )
        vocabulary = tokenizer.token_bytes()
        found.append((vocabulary, Respeller(tokenizer, vocabulary)))
    return found


def _are_same(target: Tokenizer | None, draft: Tokenizer | None) -> bool:
    return target is not None and draft is not None and target.vocabulary() == draft.vocabulary()
