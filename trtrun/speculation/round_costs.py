"""What rounds cost, as the start measured it: seconds by number of rows and draft_len.

It knows numbers. It does not know how they were measured (start/rehearsed_rounds.py) or what follows (pacing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
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


def _on_line(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at `place` of the lines through `values`, which do not fall."""
    if len(places) == 1:
        return values[0]
    above = min(max(1, bisect_left(places, place)), len(places) - 1)
    low, high = places[above - 1], places[above]
    slope = max(0.0, (values[above] - values[above - 1]) / (high - low))
    return values[above - 1] + slope * max(0, place - low)
