"""How often draft tokens were right, by their position in the draft, what that promises, and a warning where drafts are
not worth their time.

A token is looked at where all before it in its draft were kept. What was seen counts less with every round that brings
more; of a position that was seen little the one before it says most, as drafts that are often right at one position
are so at the next.

A drafter that was read wrong, or belongs to another model, changes no text: acceptance alone shows it, and nobody looks
for that who does not expect it. So it is said once, in words for people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.98
"""What is kept of older counts with every round that brings new ones: the last fifty rounds weigh most."""

_USUAL, _TRUST_IN_USUAL = 0.8, 0.5
"""How often a first token is right where nothing was seen, and as much as so many tokens that counts."""

_LEFT_IN_DOUBT = 4.0
"""First tokens that count of all that were seen, where drafts are no more as good as these were."""

_MISTRUST = 2.0
"""As much as so many that were wrong counts, to one who takes drafts for bad, that nothing was seen."""

_TRUST_IN_PLACE_BEFORE = 3.0
"""As much as so many tokens of a place counts what is known of the one before it."""

_MOST_REMEMBERED = 32.0
"""First tokens of an earlier run that count, at most: its texts may have been others."""


@dataclass(frozen=True)
class DraftRecord:
    """What runs have seen of a pair's drafts.

    Attributes:
        offered, accepted: see PositionAcceptance.
        stake: what drafts may cost beyond what they gain, in rounds without any.
        pays: whether drafting was worth while at the end.
    """

    offered: tuple[float, ...]
    accepted: tuple[float, ...]
    stake: float
    pays: bool


@dataclass
class PositionAcceptance:
    """How often the token at each place of a draft was accepted, for drafts of up to a number of tokens.

    Attributes:
        offered: by place, how many tokens were looked at, the older ones for less.
        accepted: how many of them were kept.
    """

    offered: list[float]
    accepted: list[float] = field(default_factory=list)

    @classmethod
    def unknown(cls, most: int) -> PositionAcceptance:
        """The record of drafts of up to `most` tokens that nobody has seen."""
        return cls([0.0] * most, [0.0] * most)

    def remember(self, offered: Sequence[float], accepted: Sequence[float]) -> None:
        """Begin with what an earlier run has seen, by place, as one that may be about other texts."""
        share = min(1.0, _MOST_REMEMBERED / offered[0]) if offered and offered[0] > 0 else 0.0
        for place, (count, kept) in enumerate(zip(offered, accepted, strict=False)):
            if place < len(self.offered):
                self.offered[place], self.accepted[place] = count * share, kept * share

    @property
    def num_seen(self) -> float:
        """First tokens that were looked at, the older ones for less."""
        return self.offered[0]

    def first_rate(self) -> float:
        """The share of first tokens that were kept, of those that were looked at; 0 where none were."""
        return self.accepted[0] / self.offered[0] if self.offered[0] else 0.0

    def record(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Take in a round's drafts: how many tokens each had, and how many of them were kept."""
        most = len(self.offered)
        offered_below, accepted_below = [0] * (most + 1), [0] * (most + 1)
        for drafted, accepted in drafts:
            # Verification stops at a rejection: a position is offered where everything before it was accepted.
            offered_below[min(drafted, accepted + 1)] += 1
            accepted_below[accepted] += 1
        offered = kept = 0
        for place in reversed(range(most)):
            offered += offered_below[place + 1]
            kept += accepted_below[place + 1]
            if offered:
                self.offered[place] = self.offered[place] * _MEMORY + offered
                self.accepted[place] = self.accepted[place] * _MEMORY + kept

    def doubt(self) -> None:
        """Take what was seen for less, as drafts are no more what they were."""
        share = min(1.0, _LEFT_IN_DOUBT / self.offered[0]) if self.offered[0] else 1.0
        for counts in (self.offered, self.accepted):
            counts[:] = [count * share for count in counts]

    def expected_tokens(self) -> list[float]:
        """Tokens that a row is expected to gain, by the number that are drafted, from none on: 1, and each draft
        token that all before it let through."""
        return self._tokens(_USUAL, _TRUST_IN_USUAL)

    def least_tokens(self) -> list[float]:
        """Expect the tokens as one who takes drafts for bad until they were seen to be good."""
        return self._tokens(0.0, _MISTRUST)

    def _tokens(self, rate: float, trust: float) -> list[float]:
        """Acceptance rates by position, each of which is as the one before it, and the first has this `rate`, as far as
        is not known."""
        found, tokens, chance = [1.0], 1.0, 1.0
        for offered, accepted in zip(self.offered, self.accepted, strict=True):
            rate = (accepted + trust * rate) / (offered + trust)
            trust = _TRUST_IN_PLACE_BEFORE
            chance *= rate
            tokens += chance
            found.append(tokens)
        return found


_ENOUGH_DRAFTS = 256
_ENOUGH_OF_FEW = 16
"""Drafts of rows that are counted before anything is said; few where the pacer has judged: it stops drafting then."""

_RARELY = 0.05
"""Share of first tokens that are kept, below which no draft_len pays anywhere; for runs whose draft_len is fixed."""

_OFTEN = 0.4
"""Share of them from which on the drafter itself is hardly to blame."""


class AcceptanceWatch:
    """Watches the acceptance of one job."""

    def __init__(self, most_drafted: int, to_check: str) -> None:
        """Watch drafts of up to `most_drafted` tokens; `to_check` is what may be wrong with a drafter that is seldom
        right."""
        self._to_check = to_check
        self._most_drafted = most_drafted
        self._counts = Counter[tuple[int, int]]()
        self._num_drafts = 0
        self._next_look = _ENOUGH_DRAFTS
        self._has_spoken = False

    def record(self, acceptances: Sequence[tuple[int, int]]) -> None:
        """Count drafts: how many tokens each had, and how many of them were kept."""
        if not self._has_spoken:
            self._num_drafts += len(acceptances)
            self._counts.update(acceptances)

    def complain(self, pays: bool | None) -> str | None:
        """What there is to say, once.

        Args:
            pays: whether drafts have been worth their time lately; None where nobody measures that.

        Returns:
            A line, or None.
        """
        if self._has_spoken or pays or self._num_drafts < (self._next_look if pays is None else _ENOUGH_OF_FEW):
            return None
        by_place = [self._at(place) for place in range(self._most_drafted)]
        first = by_place[0][0] / max(1, by_place[0][1])
        if pays is None and first >= _RARELY:
            self._next_look = 2 * self._num_drafts  # good ones cost nothing in most rounds
            return None
        self._has_spoken = True
        shares = ", ".join(f"{kept / offered:.0%} of {offered}" for kept, offered in by_place if offered)
        why = (
            "that is often, but a round with drafts takes longer than they save here: a smaller or quantized draft, or "
            "devices of its own, may help"
            if first >= _OFTEN
            else f"that is seldom: {self._to_check}"
        )
        return (
            f"drafts are not worth their time here: the target kept of first, second, … tokens {shares}; {why}; "
            "speculation.method none saves what drafts take, and no text changes"
        )

    def _at(self, place: int) -> tuple[int, int]:
        """How many tokens of a place were kept, and how many were looked at: none behind one that was rejected."""
        kept = sum(count for (_, accepted), count in self._counts.items() if accepted > place)
        looked_at = sum(
            count for (drafted, accepted), count in self._counts.items() if min(drafted, accepted + 1) > place
        )
        return kept, looked_at
