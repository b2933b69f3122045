"""How much is drafted ahead in a round, for which verdicts, and when a fresh draft is worth waiting for.

The policy answers two questions in tokens a second, by measured times. How many verdicts to guess: more are right more
often, but the target waits where the draft ranks are done after it; none at all where a fresh draft in each round gains
more, as where a verification is short beside what guesses take. And how many rows must have missed until a fresh draft
for them, which all rows wait for, gains more tokens than the wait costs.

The fan-out deals the guesses. The verdict on a draft of k tokens is a position (how many of them are accepted, 0 to k)
and the token that follows. The draft's own candidates for that token are in order of likelihood, so a guess is a
position and a rank. How often each position comes up, and how far down the order its token stands, differs from pair to
pair and from text to text; this keeps count, and gives the guesses to the pairs of position and rank that are likeliest
together. The question is that of Saguaro's cache (arXiv:2603.03251), with running counts in place of a profile. All
draft ranks see the same verdicts, so all answer alike.

All of it is numbers: no tokens, clocks or devices.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

MOST_RANKS = 8
"""Candidates that are kept of each place."""

_OUTCOME_MEMORY = 0.98
"""What is kept of older counts with every verdict: the last fifty weigh most."""

_PRIOR_ACCEPTANCE = 0.8
_PRIOR_WEIGHT = 8.0

_AFTER_REJECTION = (0.45, 0.16, 0.09, 0.06, 0.04, 0.03, 0.02, 0.02)
_AFTER_ALL = (0.76, 0.12, 0.04, 0.02, 0.01, 0.01, 0.005, 0.005)
"""How often the verdict's token had each rank, before anything is measured: after a rejected draft token the draft was
wrong once already; after all of a draft, or none, it has not said anything yet."""


class CandidateBudget:
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
            self._offered[place] = self._offered[place] * _OUTCOME_MEMORY + 1
            self._accepted[place] = self._accepted[place] * _OUTCOME_MEMORY + (place < accepted)
        whole = accepted == drafted
        counts = self._ranks[whole]
        for place in range(MOST_RANKS):
            counts[place] *= _OUTCOME_MEMORY
        self._seen[whole] = self._seen[whole] * _OUTCOME_MEMORY + 1
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


@dataclass(frozen=True)
class GuessSpace:
    """What of an engine belongs to guesses.

    Attributes:
        most_guesses: of a round.
        first_row: the first of as many rows of the engine.
        first_block: the first of as many times `blocks_per_guess` blocks of its store.
        blocks_per_guess: for the rest of the last block that a row shares, and a draft behind it.
    """

    most_guesses: int
    first_row: int
    first_block: int
    blocks_per_guess: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all guesses."""
        return self.most_guesses * self.blocks_per_guess

    def rows(self, count: int) -> list[int]:
        """The first `count` rows."""
        return list(range(self.first_row, self.first_row + count))

    def blocks(self, index: int) -> range:
        """The blocks of one guess."""
        first = self.first_block + index * self.blocks_per_guess
        return range(first, first + self.blocks_per_guess)


NEVER = 1 << 30
"""More rows than any round has."""

_NUM_SAMPLES = 9
_SHARE_OF_VERIFYING = 0.9
"""Share of the time of a verification that drafting ahead may take before the target waits: verdict and draft travel.
As much of what a fresh draft in each round takes is drafting."""

_FEWEST_SAMPLES = 4
"""Before that a number of guesses, or a fresh draft, is still being tried: the first time, kernels are made."""

_ROUNDS_TO_RETRY = 100
"""After so many rounds what was found too slow is tried once more: something else may have run when it was. A number of
guesses is tried after as many times more as it was slower."""

_FIRST_GUESSES_PER_ROW = 4
_MEMORY = 0.9


def _samples() -> deque[float]:
    return deque(maxlen=_NUM_SAMPLES)


@dataclass
class _Load:
    """What is known of rounds with about the same number of rows. Times are seconds.

    Attributes:
        rounds: how many numbers of guesses were asked for.
        last_tried: of each number of guesses, in which of these rounds.
        verifying: of verifications.
        anticipating: of drafting ahead, by the number of guesses that was chosen.
        redrafting: of fresh drafts, for each row and as a whole.
        rounds_without_redraft: for how many rounds fresh drafts were found not to be worth their wait.
        always_redrafts: whether nothing is guessed, as each round is better off with a fresh draft.
    """

    rounds: int = 0
    last_tried: dict[int, int] = field(default_factory=dict)
    verifying: deque[float] = field(default_factory=_samples)
    anticipating: dict[int, deque[float]] = field(default_factory=dict)
    redrafting: deque[float] = field(default_factory=_samples)
    rounds_without_redraft: int = 0
    always_redrafts: bool = False

    def known_anticipating(self) -> dict[int, float]:
        """Seconds by guesses, where there are samples enough; the longest one is left out."""
        return {
            count: _typical(samples) for count, samples in self.anticipating.items() if len(samples) >= _FEWEST_SAMPLES
        }


class AheadPolicy:
    """The orchestrator's, for one job."""

    def __init__(
        self, steps: Sequence[int], draft_len: int, *, always_redrafts: bool, always_guesses: bool = False
    ) -> None:
        """Start without knowledge.

        Args:
            steps: numbers of guesses to choose from, ascending; none where nothing is drafted ahead.
            draft_len: tokens of a draft, at most.
            always_redrafts: whether rows that miss are always drafted again.
            always_guesses: whether verdicts are guessed where a fresh draft in each round gains more, too.
        """
        most_guesses = max(steps, default=0)
        self._steps = tuple(steps)
        self._most = most_guesses
        self._always = always_redrafts or not most_guesses
        self._always_guesses = always_guesses
        self._loads: dict[int, _Load] = {}
        self._tokens_per_second = 0.0
        self._tokens_with_draft = 0.0
        self._hit_chances: Sequence[float] = CandidateBudget(draft_len).hit_chances(draft_len)

    def num_guesses(self, num_rows: int) -> int:
        """Verdicts to guess in a round in which `num_rows` rows decode; prompts may end in one without any."""
        if not self._steps:
            return 0
        load = self._load(max(1, num_rows))
        chosen = self._choose(load, max(1, num_rows))
        load.always_redrafts = not chosen
        load.rounds += 1
        load.last_tried[chosen] = load.rounds
        return chosen

    def _choose(self, load: _Load, num_rows: int) -> int:
        """The number of guesses that gives most tokens a second, as far as is known."""
        known = load.known_anticipating()
        enough = [step for step in self._steps if step >= num_rows] or [self._most]
        first = next((step for step in enough if step >= num_rows * _FIRST_GUESSES_PER_ROW), enough[-1])
        if not known or not load.verifying:
            return first
        # What nothing is known of is tried where it might be best, one step at a time.
        near = {at + beside for at, step in enumerate(enough) if step in known for beside in (-1, 0, 1)}
        verifying = statistics.median(load.verifying)
        redrafting = _typical(load.redrafting) / _SHARE_OF_VERIFYING if len(load.redrafting) >= _FEWEST_SAMPLES else 0.0
        seconds_of, rates = {}, {}
        for at in sorted(near & set(range(len(enough)))):
            step = enough[at]
            seconds = known.get(step, max((known[less] for less in enough[:at] if less in known), default=0.0))
            seconds_of[step] = max(verifying, seconds / _SHARE_OF_VERIFYING)
            rates[step] = self._gain(step, num_rows) / seconds_of[step]
            if redrafting:  # for whoever missed, whom all wait for
                missing = 1 - self._chance(step, num_rows) ** num_rows
                rates[step] = max(rates[step], self._tokens_with_draft / (seconds_of[step] + missing * redrafting))
        if redrafting and rates and not self._always_guesses:
            seconds_of[0] = verifying + redrafting
            rates[0] = self._tokens_with_draft / seconds_of[0]
        best = max(rates, key=rates.__getitem__, default=first)
        for step, seconds in seconds_of.items():
            could_be_better = step > 0 and self._gain(step, num_rows) / verifying > rates[best]
            due = load.last_tried.get(step, load.rounds) + _ROUNDS_TO_RETRY * seconds / seconds_of[best]
            if could_be_better and load.rounds >= due:
                return step
        return best

    def _gain(self, num_guesses: int, num_rows: int) -> float:
        """Tokens that a row gains in a round, where so many guesses are made for all rows and none is drafted again."""
        return 1 + self._chance(num_guesses, num_rows) * max(0.01, self._tokens_with_draft - 1)

    def _chance(self, num_guesses: int, num_rows: int) -> float:
        """How likely a row's verdict is among so many guesses for all rows."""
        if num_guesses < num_rows:
            return self._hit_chances[0] * num_guesses / num_rows
        return self._hit_chances[min(num_guesses // num_rows, len(self._hit_chances)) - 1]

    def redraft_threshold(self, num_rows: int) -> int:
        """Rows without a draft from which on a fresh one is worth its wait; asked once a round."""
        load = self._load(num_rows)
        if (
            self._always
            or load.always_redrafts
            or len(load.redrafting) < _FEWEST_SAMPLES
            or not self._tokens_per_second
        ):
            return 1
        lost = _typical(load.redrafting) * self._tokens_per_second
        gained = max(0.01, self._tokens_with_draft - 1)
        needed = lost / gained
        if needed <= num_rows:
            return max(1, round(needed + 0.5))
        # Nothing is learned of drafts that are never made, so one is made again now and then.
        load.rounds_without_redraft += 1
        return NEVER if load.rounds_without_redraft % _ROUNDS_TO_RETRY else 1

    def record_draft(
        self,
        num_rows: int,
        num_guesses: int,
        anticipating: float,
        num_redrafted: int,
        drafting: float,
        hit_chances: Sequence[float] = (),
    ) -> None:
        """Take in the draft leader's report of a round with `num_rows` decode rows; times are seconds, and
        `hit_chances` what `CandidateBudget.hit_chances` gives of a whole draft, where they are told."""
        if hit_chances:
            self._hit_chances = hit_chances
        load = self._load(num_rows)
        if num_guesses and anticipating > 0:
            step = next((step for step in self._steps if step >= num_guesses), self._most)
            load.anticipating.setdefault(step, _samples()).append(anticipating)
        if num_redrafted and drafting > 0:
            load.redrafting.append(drafting)

    def record_round(
        self, num_rows: int, verifying: float, seconds: float, num_tokens: list[int], draft_lens: list[int]
    ) -> None:
        """Take in a round's result.

        Args:
            num_rows: rows that decoded.
            verifying: seconds of the target's forward.
            seconds: of the whole round.
            num_tokens: that each of these rows gained.
            draft_lens: tokens verified of each.
        """
        if verifying > 0:
            self._load(num_rows).verifying.append(verifying)
        if seconds > 0:
            self._tokens_per_second = _blend(self._tokens_per_second, sum(num_tokens) / seconds)
        with_draft = [count for count, length in zip(num_tokens, draft_lens, strict=True) if length > 0]
        if with_draft:
            self._tokens_with_draft = _blend(self._tokens_with_draft, statistics.fmean(with_draft))

    def _load(self, num_rows: int) -> _Load:
        """The load of so many rows, to a power of two."""
        return self._loads.setdefault(1 << max(0, num_rows - 1).bit_length(), _Load())


def _typical(samples: deque[float]) -> float:
    """The median of two samples or more without the longest, in which kernels may have been made."""
    return statistics.median(sorted(samples)[:-1])


def _blend(old: float, new: float) -> float:
    return new if not old else _MEMORY * old + (1 - _MEMORY) * new
