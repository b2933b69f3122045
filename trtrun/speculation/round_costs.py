"""What rounds cost: seconds by number of rows and draft_len, as the start measured or assumed them, and as the run has
measured them since.

It does not know how rounds are timed, or how many tokens to draft (pacing.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


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


NUM_SAMPLES = 16
"""Times kept for a draft_len under a load; their lower quartile counts. What slows some rounds down, another program or
caches that a change of draft_len has emptied, says nothing of the others, and would be remembered for long of a
draft_len that is not in use."""

_FEWEST_SAMPLES = 2

_TRUST = 1
"""As much as so many samples of one draft_len counts what all of a load say of the measured costs."""


@dataclass(slots=True)
class Load:
    """What is known of rounds with about the same number of rows.

    Attributes:
        num_rows: about so many.
        share_drafted: of these rows, those that tokens are drafted for.
        current: the draft_len in use.
        rounds: how many were recorded.
        seconds: by draft_len, the last times.
        last_seen: by draft_len, the value of `rounds` when it was recorded last.
        trial: the draft_len on trial, for `trial_left` rounds more.
        pause: rounds between the last trial and the next, which is due when `rounds` comes to `next_trial`.
        costs: by draft_len, what the start expects a round to take; empty where it measured nothing.
        extra: by draft_len, what a round is expected to take beyond one without drafts, as a share of it; empty where
            nothing is expected.
        goodput: by draft_len, tokens a second that a row was last expected to gain.
    """

    num_rows: int
    share_drafted: float
    current: int
    pause: int
    next_trial: int
    costs: list[float] = field(default_factory=list)
    rounds: int = 0
    seconds: dict[int, deque[float]] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    trial: int = 0
    trial_left: int = 0
    extra: list[float] = field(default_factory=list)
    goodput: list[float] = field(default_factory=list)

    def known_seconds(self) -> dict[int, float]:
        """Seconds of a round by draft_len, in order of draft_len, where there are samples enough."""
        return {
            draft_len: _typical(samples)
            for draft_len, samples in sorted(self.seconds.items())
            if len(samples) >= _FEWEST_SAMPLES
        }

    def distance(self) -> float:
        """How many times longer or shorter than the costs said a round of the present draft_len is; 1 where none was
        seen."""
        samples = self.seconds.get(self.current)
        ratio = _typical(samples) / self.costs[self.current] if samples else 1.0
        return max(ratio, 1 / ratio)

    def expected_seconds(self) -> list[float]:
        """Seconds of a round by draft_len, from the costs: times what rounds have taken of them. A draft_len that was
        not seen is as its neighbour that was."""
        ratios = {
            draft_len: (len(samples), _typical(samples) / self.costs[draft_len])
            for draft_len, samples in self.seconds.items()
            if draft_len < len(self.costs)
        }
        if not ratios:
            return self.costs
        pooled = sum(count * ratio for count, ratio in ratios.values()) / sum(count for count, _ in ratios.values())
        found = []
        for draft_len, seconds in enumerate(self.costs):
            count, ratio = ratios[_nearest(ratios, draft_len)]
            found.append(seconds * (count * ratio + _TRUST * pooled) / (count + _TRUST))
        return found


def _typical(samples: Iterable[float]) -> float:
    """The lower quartile."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]


def _nearest(places: Iterable[int], place: int) -> int:
    return min(places, key=lambda one: abs(one - place))


def rounded(num_rows: int) -> int:
    """A number of rows, to a quarter of a power of two."""
    step = max(1, 1 << max(0, (num_rows - 1).bit_length() - 3))
    return -(-num_rows // step) * step


def estimate_between(known: dict[int, float], draft_len: int) -> float:
    """Seconds of a round of `draft_len`: the line through its neighbours in `known`, which is in order and holds two.

    Below the shortest one known a round takes no less than its share of positions: fewer would cost less than nothing.
    """
    if draft_len in known:
        return known[draft_len]
    lens = list(known)
    above = next((place for place, value in enumerate(lens) if value > draft_len), len(lens) - 1)
    low, high = lens[max(0, above - 1)], lens[max(1, above)]
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    line = known[low] + slope * (draft_len - low)
    shortest = lens[0]
    if draft_len < shortest:
        return max(line, known[shortest] * (draft_len + 1) / (shortest + 1))
    return line
