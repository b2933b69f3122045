"""Matches of a row: where its last tokens stood before in its own text, and how often what followed there came again.

A drafter that proposes what texts repeat finds such a match by itself. Here it is followed on the host, token by token,
whether anything is drafted or not: so it costs a microsecond a token, and no verification, to know what drafts of a
match would be worth. The longer a match has held, the likelier its next token; how likely is counted by its length,
over all rows. It knows tokens. It does not know rounds, times, or what is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.configuration.drafting.speculation_section import MatchRule

_LENGTHS = (0, 1, 2, 4, 8, 16)
NUM_KINDS = len(_LENGTHS) + 1
"""Kinds of matches: none, and lengths up to each of these numbers; the last has all that are longer."""

_USUAL = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
_TRUST_IN_USUAL = 2.0
"""How often the next token of each kind is right where nothing was seen, and as much as so many tokens that counts."""

_MEMORY = 0.99
"""What is kept of older counts of a kind with every token that brings more."""

_MOST_READ, _ALWAYS_READ = 2048, 64
"""Tokens that are read in a round over all rows, which is some two milliseconds; and those that a row may read whatever
others have, as it gains no more in a round."""

_MOST_INDEXED = 1 << 14
"""Tokens of a text in which matches are found, the last ones of its prompt and what follows."""


def kind_of(length: int) -> int:
    """The kind of a match of so many tokens; 0 for none."""
    return next((kind for kind, most in enumerate(_LENGTHS) if length <= most), NUM_KINDS - 1)


class MatchRecord:
    """How often the next token of a match was right, by its kind.

    Attributes:
        offered: by kind, how many were looked at, the older ones for less.
        accepted: how many of them were right.
    """

    def __init__(self) -> None:
        self.offered = [0.0] * NUM_KINDS
        self.accepted = [0.0] * NUM_KINDS
        self._left_to_read = _MOST_READ

    def begin_round(self) -> None:
        """A round's results come: rows may read on in their texts."""
        self._left_to_read = _MOST_READ

    def take(self, count: int) -> int:
        """How many of `count` tokens a row may read now."""
        allowed = min(count, max(_ALWAYS_READ, self._left_to_read))
        self._left_to_read -= allowed
        return allowed

    def note(self, kind: int, is_right: bool) -> None:
        """The next token of a match of this kind was seen."""
        self.offered[kind] = self.offered[kind] * _MEMORY + 1
        self.accepted[kind] = self.accepted[kind] * _MEMORY + is_right

    def forget_some(self, kind: int) -> None:
        """What was seen of this kind counts for less, as nobody looks."""
        self.offered[kind] *= _MEMORY
        self.accepted[kind] *= _MEMORY

    def rate(self, kind: int) -> float:
        """How likely the next token of a match of this kind is right."""
        return (self.accepted[kind] + _TRUST_IN_USUAL * _USUAL[kind]) / (self.offered[kind] + _TRUST_IN_USUAL)

    def expected_tokens(self, kind: int, most: int) -> list[float]:
        """Tokens, by the number that are drafted, from none to `most`, that a row with a match of this kind is
        expected to gain: 1, and each draft token that all before it let through, whose match is longer by these."""
        found, tokens, chance = [1.0], 1.0, 1.0
        length = _LENGTHS[kind] if kind < len(_LENGTHS) else _LENGTHS[-1] + 1
        for place in range(most):
            chance *= self.rate(kind if not place else max(kind, kind_of(length + place)))
            tokens += chance
            found.append(tokens)
        return found


class OwnMatch:
    """The match of one row, as a drafter would find it."""

    def __init__(self, rule: MatchRule, record: MatchRecord) -> None:
        """Find matches by `rule`, and count what becomes of them in `record`."""
        self._record = record
        self._takes_first = rule.takes_first
        between = (rule.most - rule.fewest) // 3
        self._sizes = sorted({rule.most, rule.most - between, rule.fewest + between, rule.fewest}, reverse=True)
        self._behind: dict[tuple[int, ...], int] = {}
        self._place = -1
        self._length = 0
        self._num_read = 0
        self._elsewhere = 0

    def kind(self, token_ids: Sequence[int]) -> int:
        """The kind of match that the row's last tokens have, or of one in other texts that has just been right; 0 for
        none, and where its prompt is not read yet."""
        if self._num_read < len(token_ids):
            return 0
        return kind_of(self._length or self._elsewhere)

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        """Read on in the row's tokens, as far as a round has time; what comes of the first `num_known`, its prompt, is
        not counted."""
        if not self._num_read:
            self._num_read = max(0, len(token_ids) - _MOST_INDEXED)
        end = self._num_read + self._record.take(len(token_ids) - self._num_read)
        for index in range(self._num_read, end):
            self._take(token_ids, index, index >= num_known)
        self._num_read = end

    def note_draft(self, num_drafted: int, num_accepted: int) -> None:
        """A draft was verified, before its tokens are read: where the row has no match of its own it came of others."""
        if self._length:
            self._elsewhere = 0
            return
        self._record.note(0, num_accepted > 0)
        is_whole = num_drafted > 0 and num_accepted == num_drafted
        self._elsewhere = self._elsewhere + num_accepted if is_whole else 0

    def _take(self, token_ids: Sequence[int], index: int, is_counted: bool) -> None:
        """The next token, at `index`."""
        held = 0
        if self._length:
            is_right = token_ids[self._place] == token_ids[index]
            if is_counted:
                self._record.note(kind_of(self._length), is_right)
            held = self._length + 1 if is_right else 0
            self._place += 1
        keys = [tuple(token_ids[index + 1 - size : index + 1]) for size in self._sizes if size <= index + 1]
        if self._takes_first or not held:
            found = next((key for key in keys if key in self._behind), ())
            self._place, held = self._behind.get(found, -1), max(len(found), held) if found else 0
        self._length = held
        has_room = len(self._behind) < len(self._sizes) * _MOST_INDEXED
        for key in keys:
            if key not in self._behind:
                if has_room:
                    self._behind[key] = index + 1
            elif not self._takes_first:
                self._behind[key] = index + 1
