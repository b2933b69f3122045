"""Translates a growing text from one vocabulary's tokens into another's; and reads the vocabularies of a target and a
draft, and how drafts get from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from trtrun.errors import CheckpointError
from trtrun.tokens.respelling import Respeller, whole_characters
from trtrun.tokens.text import Tokenizer, hash_tokenizer_files, read_tokenizer
from trtrun.tokens.token_bytes import CommonTokens, TokenBytes, find_common_tokens

_KEPT_BYTES = 64
_MOST_BYTES = 128
"""At the end of a text that are spelled anew when it goes on: beyond the second a part is left as it is, up to where a
word begins, at least the first from the end."""

_ENDLESS_BYTES = 1024
"""Bytes after which a text in which no word begins is parted between any two tokens."""

_LOOKED_BACK = 16
"""Tokens of a text that are spelled again together with what is put behind it."""


@dataclass(frozen=True)
class Vocabularies:
    """A target's and a draft's.

    Attributes:
        target, draft: what their tokens stand for.
        common: what they have in common.
        target_speller, draft_speller: make tokens of bytes.
    """

    target: TokenBytes
    draft: TokenBytes
    common: CommonTokens
    target_speller: Respeller
    draft_speller: Respeller

    def kept(self, *, texts: bool) -> dict[int, int]:
        """Tokens of the target that are one token of the draft each, wherever they stand: special ones, and with
        `texts` all that are common."""
        special = {t: d for t, d in self.common.draft_of.items() if texts or t in self.target.special}
        return {**self.common.ends, **special}

    @cached_property
    def special_of_draft(self) -> dict[int, int]:
        """The target's tokens for special tokens of the draft that mean something to it."""
        return {d: t for t, d in self.common.draft_of.items() if d in self.draft.special}

    def to_target(self, behind: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the target's tokenizer makes of a text that goes on: tokens of the target.

        Args:
            behind: tokens of the target that the text ends with, some of the last ones.
            drafted: tokens of the draft that follow, up to one that means nothing to the target.
        """
        tokens: list[int] = []
        data = b""
        for token in drafted:
            text = self.draft.of_token.get(token)
            if text is not None:
                data += text
                continue
            tokens += self._spell(behind if not tokens else (), data)
            data = b""
            if token not in self.special_of_draft:
                return tokens
            tokens.append(self.special_of_draft[token])
        return [*tokens, *self._spell(behind if not tokens else (), data)]

    def _spell(self, behind: Sequence[int], data: bytes) -> list[int]:
        """Tokens of the target for `data` behind tokens of it, without the beginning of a character at the end."""
        last = self._last_word(behind)
        before = b"".join([self.target.of_token[token] for token in last])
        data = whole_characters(before + data)[len(before) :]
        if not data:
            return []
        # Together they are what a tokenizer makes of the text; but the text may be spelled otherwise than it would.
        found = self.target_speller.spell(before + data) if last else []
        if last and found[: len(last)] == last:
            return found[len(last) :]
        return self.target_speller.spell(data)

    def _last_word(self, tokens: Sequence[int]) -> list[int]:
        """The last of `tokens`, from one that begins a word on, or those behind a special one."""
        last: list[int] = []
        for token in reversed(tokens[-_LOOKED_BACK:]):
            text = self.target.of_token.get(token)
            if text is None:
                break
            last.insert(0, token)
            if _begins_word(text, 0):
                break
        return last


class TranslatedText:
    """A text of the target's tokens in the draft's.

    Attributes:
        tokens: of the draft.
        num_final: of them that stay as they are, whatever follows.
        first_changed: place of the first of them that may be another than when somebody last set this to their number.
    """

    def __init__(self, vocabularies: Vocabularies, kept: dict[int, int]) -> None:
        """Begin without text; tokens that are `kept` (`Vocabularies.kept`) are one of the draft's each, and what stands
        between them is spelled as the draft's tokenizer spells it."""
        self._vocabularies = vocabularies
        self._kept = kept
        self._speller = vocabularies.draft_speller
        self._tail = bytearray()
        self._is_start = self._is_target_start = True
        self.tokens: list[int] = []
        self.num_final = 0
        self.first_changed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text goes on with tokens of the target. What means nothing to the draft is left out, special tokens and
        bytes that it lacks."""
        target = self._vocabularies.target
        for token in token_ids:
            other, text = self._kept.get(token), target.of_token.get(token)
            if self._is_target_start and target.opens_with_space and (text or b"").startswith(b" "):
                other = None  # by a space that is not the text's
            if other is not None or text is None:
                self._end_part()
                if other is not None:
                    self._put([other])
                    self.num_final = len(self.tokens)
                    self._is_start = self._is_start and text is None
                self._is_target_start = self._is_target_start and text is None
                continue
            if self._is_target_start and target.opens_with_space and text.startswith(b" "):
                text = text[1:]
            self._is_target_start = False
            self._tail += text
        self._spell()

    def begin_with(self, tokens: Sequence[int]) -> None:
        """Take tokens of the draft for the beginning, of which there is none yet."""
        self.tokens, self.num_final = [*tokens], len(tokens)

    def _put(self, tokens: Sequence[int]) -> None:
        """Have `tokens` behind the final ones, in place of what stands there."""
        opening = self._speller.opening
        if not self.tokens and opening and [*tokens[:1]] != [opening[0]]:
            tokens = [*opening, *tokens]
        behind = self.tokens[self.num_final :]
        pairs = enumerate(zip(behind, tokens, strict=False))
        same = next((place for place, (old, new) in pairs if old != new), min(len(behind), len(tokens)))
        self.first_changed = min(self.first_changed, self.num_final + same)
        self.tokens[self.num_final :] = tokens

    def _end_part(self) -> None:
        """What follows is no part of the same text."""
        if self._tail:
            self._spell()
            self._tail, self._is_start = bytearray(), False
        self.num_final = len(self.tokens)

    def _spell(self) -> None:
        """Spell what is not final yet, and leave its front as it is where it has become long."""
        if not self._tail:
            return
        found = self._spell_behind(bytes(self._tail))
        if len(self._tail) > _MOST_BYTES:
            self._settle(found)

    def _spell_behind(self, data: bytes) -> list[int]:
        """Have tokens for `data` behind the final ones, and return them."""
        found = self._speller.spell(data, is_start=self._is_start)
        num_before = 0 if self.tokens else len(self._speller.opening)
        self._put(found)
        self.num_final += num_before
        return found

    def _settle(self, tokens: Sequence[int]) -> None:
        """Leave the front of the tail, which is spelled as `tokens`, as it is."""
        sizes = [self._speller.num_bytes(token) for token in tokens]
        place = len(self._tail) - sum(sizes)  # below 0 by a space that is not the text's
        if place > 0:
            self._settle_bytes()
            return
        ends: list[int] = []
        for size in sizes:
            place += size
            ends.append(place)
        counts = [n for n in range(len(ends), 0, -1) if 0 < ends[n - 1] <= len(self._tail) - _KEPT_BYTES]
        count = next((n for n in counts if _begins_word(self._tail, ends[n - 1])), 0)
        if len(self._tail) > _ENDLESS_BYTES and counts:
            count = count or counts[0]
        if count:
            self.num_final += count
            self._tail, self._is_start = self._tail[ends[count - 1] :], False

    def _settle_bytes(self) -> None:
        """Settle bytes if the draft lacks some of them, so that tokens do not tell where their ends are."""
        last = len(self._tail) - _KEPT_BYTES
        end = self._tail.rfind(b" ", 0, last + 1)
        while end > 0 and not _begins_word(self._tail, end):
            end = self._tail.rfind(b" ", 0, end)
        if end <= 0 and len(self._tail) > _ENDLESS_BYTES:
            end = len(whole_characters(bytes(self._tail[:last])))
        if end > 0:
            self.num_final += len(self._spell_behind(bytes(self._tail[:end])))
            self._tail, self._is_start = self._tail[end:], False
            self._spell_behind(bytes(self._tail))


def _begins_word(text: bytes | bytearray, place: int) -> bool:
    """Whether at `place` a space stands alone, with a word behind it: there tokenizers part texts."""
    word = text[place + 1 : place + 2]
    return text[place : place + 1] == b" " and word.isalpha() and not text[max(0, place - 1) : place].isspace()


Way = Literal["same", "intersection", "text"]

_LARGE_SHARE = 0.5
"""The share of the target's tokens from which the draft chooses among the common ones: the rest could never be
proposed."""


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
    """Read both vocabularies, once for the contents that `hashes` stand for: a start needs them several times."""
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
