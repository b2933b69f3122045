"""What rounds cost, as the start measured it or as is assumed: seconds by number of rows and draft_len.

It knows numbers. It does not know how they were measured (start/rehearsed_rounds.py) or what follows (pacing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """Measured rounds, and lines between them.

    Attributes:
        seconds: by number of rows, and for each by draft_len, two of them at least; both in order.
    """

    seconds: Mapping[int, Mapping[int, float]]

    def estimate(self, num_rows: int, draft_len: int) -> float:
        """Seconds of a round of `num_rows` rows that draft `draft_len` tokens each. Beyond what was measured the last
        line goes on, but no round takes less than one of fewer rows: far beyond, what rounds take will say more."""
        counts = list(self.seconds)
        of_counts = [_on_line(list(of_rows), list(of_rows.values()), draft_len) for of_rows in self.seconds.values()]
        return _on_line(counts, of_counts, num_rows)

    def continued(self, assumed: RoundCosts) -> RoundCosts:
        """These, and beyond the most rows that were measured as many times more as `assumed` says."""
        last = max(self.seconds)
        beyond = {
            rows: {
                length: self.estimate(last, length) * took / assumed.estimate(last, length)
                for length, took in of_rows.items()
            }
            for rows, of_rows in assumed.seconds.items()
            if rows > last
        }
        return RoundCosts({**self.seconds, **beyond})


def assume_costs(
    rows: Iterable[int], most: int, num_verified: Callable[[int], int], at_once: float, draft_share: float
) -> RoundCosts:
    """What rounds may cost where nobody has measured it, as multiples of one without any position; what they take
    corrects it.

    Args:
        rows: numbers of them.
        most: draft_len, at most.
        num_verified: positions of a row by its draft_len.
        at_once: positions that take as long as reading the weights once.
        draft_share: of that time, what each drafted token takes beside.
    """
    return RoundCosts(
        {
            count: {
                length: 1 + count * num_verified(length) / at_once + length * draft_share for length in range(most + 1)
            }
            for count in sorted(rows)
        }
    )


def _on_line(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at `place` of the lines through `values`, which do not fall."""
    if len(places) == 1:
        return values[0]
    above = min(max(1, bisect_left(places, place)), len(places) - 1)
    low, high = places[above - 1], places[above]
    slope = max(0.0, (values[above] - values[above - 1]) / (high - low))
    return values[above - 1] + slope * max(0, place - low)
