"""How many guesses each outcome of a verification gets: what was measured of earlier ones, and a budget.

The verdict on a draft of k tokens is a place (how many of them are accepted, 0 to k) and the token that follows. The
draft's own candidates for that token are in order of likelihood, so a guess is a place and a rank. How often each place
comes up, and how far down the order its token stands, differs from pair to pair and from text to text; this keeps
count, and gives the guesses to the pairs of place and rank that are likeliest together. The question is that of
Saguaro's cache (arXiv:2603.03251), with running counts in place of a profile.

It knows places, ranks and counts. It does not know rows, tokens or how guesses are computed. All draft ranks see the
same verdicts, so all answer alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import accumulate, islice

MOST_RANKS = 8
"""Candidates that are kept of each place."""

_MEMORY = 0.98
"""What is kept of older counts with every verdict: the last fifty weigh most."""

_PRIOR_ACCEPTANCE = 0.8
_PRIOR_WEIGHT = 8.0

_AFTER_REJECTION = (0.45, 0.16, 0.09, 0.06, 0.04, 0.03, 0.02, 0.02)
_AFTER_ALL = (0.76, 0.12, 0.04, 0.02, 0.01, 0.01, 0.005, 0.005)
"""How often the verdict's token had each rank, before anything is measured: after a rejected draft token the draft was
wrong once already; after all of a draft, or none, it has not said anything yet."""


class FanOut:
    """Running counts of the verdicts on one job's drafts."""

    def __init__(self, draft_len: int) -> None:
        """Start from rough figures, for drafts of up to `draft_len` tokens."""
        self._offered = [_PRIOR_WEIGHT] * draft_len
        self._accepted = [_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE] * draft_len
        self._ranks = {
            False: [_PRIOR_WEIGHT * chance for chance in _AFTER_REJECTION],
            True: [_PRIOR_WEIGHT * chance for chance in _AFTER_ALL],
        }
        self._seen = {False: _PRIOR_WEIGHT, True: _PRIOR_WEIGHT}

    def record(self, drafted: int, accepted: int, rank: int | None) -> None:
        """Count one verdict.

        Args:
            drafted: tokens that were verified.
            accepted: of them, kept.
            rank: of the token that followed, among the candidates of its place; None where it was not there.
        """
        for place in range(min(accepted + 1, drafted)):
            self._offered[place] = self._offered[place] * _MEMORY + 1
            self._accepted[place] = self._accepted[place] * _MEMORY + (place < accepted)
        whole = accepted == drafted
        counts = self._ranks[whole]
        for place in range(MOST_RANKS):
            counts[place] *= _MEMORY
        self._seen[whole] = self._seen[whole] * _MEMORY + 1
        if rank is not None and rank < MOST_RANKS:
            counts[rank] += 1

    def chances(self, drafted: int) -> list[float]:
        """How likely each number of accepted tokens is for a draft of `drafted` tokens: 0 to `drafted`."""
        chances, left = [], 1.0
        for place in range(drafted):
            share = self._accepted[place] / self._offered[place]
            chances.append(left * (1 - share))
            left *= share
        return [*chances, left]

    def allocate(self, drafted: int, budget: int) -> list[int]:
        """Guesses for each place of a draft of `drafted` tokens, 0 to `drafted`, at most `budget` in all.

        A place's candidates are taken in order: its second is worth a guess after its first is.
        """
        counts = [0] * (drafted + 1)
        for place, _ in islice(self._in_order(drafted), budget):
            counts[place] += 1
        return counts

    def hit_chances(self, drafted: int) -> list[float]:
        """How likely a verdict on a draft of `drafted` tokens is among the guesses of a budget of 1, 2, … as far as
        there are candidates."""
        return list(accumulate(chance for _, chance in self._in_order(drafted)))

    def _in_order(self, drafted: int) -> Iterator[tuple[int, float]]:
        """Guesses in the order in which they are worth making: each one's place and chance."""
        chances = self.chances(drafted)
        heap = [(-chance * self._share(place == drafted, 0), place, 0) for place, chance in enumerate(chances)]
        heapq.heapify(heap)
        while heap:
            chance, place, rank = heapq.heappop(heap)
            yield place, -chance
            if rank + 1 < MOST_RANKS:
                worth = chances[place] * self._share(place == drafted, rank + 1)
                heapq.heappush(heap, (-worth, place, rank + 1))

    def _share(self, whole: bool, rank: int) -> float:
        return self._ranks[whole][rank] / self._seen[whole]
