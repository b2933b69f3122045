"""Says once, in words for people, that drafts are not worth their time: how often each token of them was kept, and what
to look at.

A drafter that was read wrong, or belongs to another model, changes no text: acceptance alone shows it, and nobody looks
for that who does not expect it. It knows counts and the pacer's judgement. It does not know models, rounds or logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_ENOUGH_DRAFTS = 256
_ENOUGH_OF_FEW = 16
"""Drafts of rows that are counted before anything is said; few where the pacer has judged: it stops drafting then."""

_RARELY = 0.05
"""Share of first tokens that are kept, below which no draft_len pays anywhere; for runs whose draft_len is fixed."""

_OFTEN = 0.4
"""Share of them from which on the drafter itself is hardly to blame."""


class AcceptanceWatch:
    """Of one job."""

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
