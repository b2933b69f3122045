"""What rounds take behind so many guesses, as the start measured them and as the run has since.

Times are those of whole rounds, from one verdict to the next, by the orchestrator's clock, so that all that a guess
costs anywhere is in them. The phases that a draft rank reports are not used: a GPU's are told once they are known, of
no round, of one or of two at a time. A round belongs to the guesses that were made in the round before: it begins
when these are drafted, and what they missed is drafted again in it.

It does not know how rounds are timed, or what follows from it (policy.py).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_NUM_SAMPLES = 9

FEWEST_SAMPLES = 3
"""Before that a number of guesses, or a fresh draft, is still being tried: the first time, kernels are made."""


@dataclass(frozen=True)
class AheadCosts:
    """What rounds of one number of rows take, in seconds.

    Attributes:
        verifying: the target's forward.
        beside: a round in which all drafts are made behind the verdict, while the target waits.
        ahead: by the number of guesses, one whose drafts were made ahead.
    """

    verifying: float
    beside: float
    ahead: Mapping[int, float]

    def between(self, other: AheadCosts, share: float) -> AheadCosts:
        """These, and `share` of the way to others; of guesses what both know."""

        def mixed(low: float, high: float) -> float:
            return low + share * (high - low)

        ahead = {count: mixed(self.ahead[count], other.ahead[count]) for count in self.ahead if count in other.ahead}
        return AheadCosts(mixed(self.verifying, other.verifying), mixed(self.beside, other.beside), ahead)

    def of_shorter(self, share: float) -> AheadCosts:
        """About the same of drafts of `share` of the tokens, which take as much of the time."""
        ahead = {count: max(self.verifying, share * took) for count, took in self.ahead.items()}
        return AheadCosts(self.verifying, self.verifying + share * (self.beside - self.verifying), ahead)


@dataclass(frozen=True)
class AheadRound:
    """A round's result.

    Attributes:
        num_rows: rows that decoded.
        draft_len: tokens that were asked for.
        num_guesses: guesses that were asked for in the round before; None where its time says nothing.
        num_hits: rows whose drafts were there.
        is_redrafted: whether a fresh draft was waited for.
        verifying: seconds of the target's forward; 0 where it is not known.
        seconds: from the verdict before to its own.
        num_tokens: that each of these rows gained.
        draft_lens: tokens verified of each.
    """

    num_rows: int
    draft_len: int
    num_guesses: int | None
    num_hits: int
    is_redrafted: bool
    verifying: float
    seconds: float
    num_tokens: list[int]
    draft_lens: list[int]


def costs_of(rounds: Iterable[AheadRound]) -> AheadCosts | None:
    """What a few rounds of one number of rows took; None where there are none of both ways."""
    verifying, beside = list[float](), list[float]()
    ready, redrafted = dict[int, list[float]](), dict[int, list[float]]()
    for one in rounds:
        verifying += [one.verifying] if one.verifying > 0 else []
        if one.num_guesses:
            (redrafted if one.is_redrafted else ready).setdefault(one.num_guesses, []).append(one.seconds)
        elif one.num_guesses == 0 and one.is_redrafted:
            beside.append(one.seconds)
    if not verifying or not beside or not (ready or redrafted):
        return None
    target, behind = statistics.median_low(verifying), statistics.median_low(beside)
    fresh = max(0.0, behind - target)
    ahead = {count: statistics.median_low(took) - fresh for count, took in redrafted.items()}
    ahead |= {count: statistics.median_low(took) for count, took in ready.items()}
    return AheadCosts(target, behind, {count: max(target, took) for count, took in sorted(ahead.items())})


def costs_between(costs: Mapping[int, AheadCosts], num_rows: int) -> AheadCosts | None:
    """What rounds of `num_rows` rows take, from `costs` by number of rows; None where there are none."""
    below = max((rows for rows in costs if rows <= num_rows), default=None)
    above = min((rows for rows in costs if rows >= num_rows), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        return None if nearest is None else costs[nearest]
    if below == above:
        return costs[below]
    return costs[below].between(costs[above], (num_rows - below) / (above - below))


def _samples() -> deque[float]:
    return deque(maxlen=_NUM_SAMPLES)


@dataclass
class AheadLoad:
    """What is known of rounds with about the same number of rows, and one draft_len. Times are seconds.

    Attributes:
        rounds: how many numbers of guesses were asked for.
        last_tried: of each number of guesses, in which of these rounds.
        last_retry: in which of them something was tried that was found too slow.
        verifying: of verifications.
        ready, redrafted: of rounds by the guesses before them: no fresh draft was waited for, or one was.
        rounds_without_redraft: for how many rounds fresh drafts were found not to be worth their wait.
        tokens_per_second: of all rows, lately.
    """

    rounds: int = 0
    last_tried: dict[int, int] = field(default_factory=dict)
    last_retry: int = 0
    verifying: deque[float] = field(default_factory=_samples)
    ready: dict[int, deque[float]] = field(default_factory=dict)
    redrafted: dict[int, deque[float]] = field(default_factory=dict)
    rounds_without_redraft: int = 0
    tokens_per_second: float = 0.0

    def begin_with(self, costs: AheadCosts) -> None:
        """Take what the start measured for as many samples as are believed; what comes replaces them."""
        self.verifying.extend([costs.verifying] * FEWEST_SAMPLES)
        self._add(self.redrafted, 0, [costs.beside] * FEWEST_SAMPLES)
        for count, seconds in costs.ahead.items():
            self._add(self.ready, count, [seconds] * FEWEST_SAMPLES)

    def record(self, finished: AheadRound) -> None:
        """Take in what a round took."""
        if finished.verifying > 0:
            self.verifying.append(finished.verifying)
        count = finished.num_guesses
        if count is None or finished.seconds <= 0 or (count == 0 and not finished.is_redrafted):
            return  # a plain round, where nothing was guessed
        self._add(self.redrafted if finished.is_redrafted else self.ready, count, [finished.seconds])

    def redrafting(self) -> float:
        """Seconds that a fresh draft adds to a round; 0 where it is not known."""
        found = [
            redrafted - ready
            for count in self.redrafted.keys() & self.ready.keys()
            if (redrafted := _typical(self.redrafted[count])) and (ready := _typical(self.ready[count]))
        ]
        if self.verifying and (beside := _typical(self.redrafted.get(0, ()))):
            found.append(beside - statistics.median(self.verifying))
        return max(0.0, statistics.median(found)) if found else 0.0

    def lacks_ready(self) -> bool:
        """Whether rounds with a fresh draft are known, and none without: where many rows miss each time."""
        is_known = any(count and _typical(samples) for count, samples in self.redrafted.items())
        return is_known and not any(_typical(samples) for samples in self.ready.values())

    def beside(self) -> float:
        """Seconds of a round in which nothing is guessed, and all is drafted behind the verdict; 0 where it is not
        known."""
        redrafting = self.redrafting()
        foreseen = statistics.median(self.verifying) + redrafting if redrafting and self.verifying else 0.0
        return _typical(self.redrafted.get(0, ())) or foreseen

    def ahead(self) -> dict[int, float]:
        """Seconds of rounds without a fresh draft by the guesses before them, where there are samples enough."""
        redrafting = self.redrafting()
        found = {
            count: max(0.0, seconds - redrafting)
            for count, samples in self.redrafted.items()
            if count and redrafting and (seconds := _typical(samples))
        }
        return found | {count: seconds for count, samples in self.ready.items() if (seconds := _typical(samples))}

    @staticmethod
    def _add(samples: dict[int, deque[float]], count: int, seconds: list[float]) -> None:
        samples.setdefault(count, _samples()).extend(seconds)


def _typical(samples: deque[float] | tuple[()]) -> float:
    """The median without the longest, in which kernels may have been made; 0 of too few samples."""
    return statistics.median(sorted(samples)[:-1]) if len(samples) >= FEWEST_SAMPLES else 0.0
