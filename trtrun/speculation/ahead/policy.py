"""How much is drafted ahead in a round, for which verdicts, and when a fresh draft is worth waiting for.

The policy answers two questions in tokens a second, by what whole rounds took (ahead_costs.py). How many verdicts to
guess: more are right more often, but the target waits where the draft ranks are done after it; none at all where a
fresh draft in each round gains more, as where a verification is short beside what guesses take. And how many rows must
have missed until a fresh draft for them, which all rows wait for, gains more tokens than the wait costs.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from trtrun.speculation.ahead.ahead_costs import AheadCosts, AheadLoad, AheadRound, costs_between

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
        self.record_acceptance(drafted, accepted)
        whole = accepted == drafted
        counts = self._ranks[whole]
        for place in range(MOST_RANKS):
            counts[place] *= _OUTCOME_MEMORY
        self._seen[whole] = self._seen[whole] * _OUTCOME_MEMORY + 1
        if rank is not None and rank < MOST_RANKS:
            counts[rank] += 1

    def record_acceptance(self, drafted: int, accepted: int) -> None:
        """Count one verdict of whose place no candidates are known."""
        for place in range(min(accepted + 1, drafted)):
            self._offered[place] = self._offered[place] * _OUTCOME_MEMORY + 1
            self._accepted[place] = self._accepted[place] * _OUTCOME_MEMORY + (place < accepted)

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

_ROUNDS_TO_RETRY = 100
"""After so many rounds what was found too slow is tried once more: something else may have run when it was. A number of
guesses is tried after as many times more as it was slower."""

_PRIOR_HITS, _USUAL, _HOPED = 4.0, 1.25, 1.6
"""As many hits are taken for seen at first as `_USUAL` times what is expected, as the rough figures are those of a poor
draft; and until a round has shown it, `_HOPED` times are hoped for, as a look costs a round."""

_SUREST = 0.98
"""How likely a hit is taken to be, at most."""

FIRST_GUESSES_PER_ROW = 4
_MEMORY = 0.9


def enough_guesses(steps: Sequence[int], num_rows: int) -> list[int]:
    """List those of `steps`, ascending, that leave each row a guess; the last where none does."""
    return [step for step in steps if step >= num_rows] or [steps[-1]]


class AheadPolicy:
    """The orchestrator's, for one job."""

    def __init__(
        self,
        steps: Sequence[int],
        draft_len: int,
        *,
        always_redrafts: bool,
        always_guesses: bool = False,
        costs: Mapping[int, AheadCosts] | None = None,
    ) -> None:
        """Start with what is known of rounds.

        Args:
            steps: numbers of guesses to choose from, ascending; none where nothing is drafted ahead.
            draft_len: tokens of a draft, at most.
            always_redrafts: whether rows that miss are always drafted again.
            always_guesses: whether verdicts are guessed where a fresh draft in each round gains more, too.
            costs: by number of rows, what the start measured of rounds of `draft_len` tokens; else all of it is
                learned on the way.
        """
        most_guesses = max(steps, default=0)
        self._steps = tuple(steps)
        self._most = most_guesses
        self._draft_len = draft_len
        self._always = always_redrafts or not most_guesses
        self._always_guesses = always_guesses
        self._costs = costs or {}
        self._loads: dict[tuple[int, int], AheadLoad] = {}
        self._guesses: tuple[int | None, int | None] = None, None  # of the last plan, and of the one before
        self._tokens_with_draft = 0.0
        self._has_looked = False
        self._num_hits, self._expected_hits = _USUAL * _PRIOR_HITS, _PRIOR_HITS
        self._hit_chances: Sequence[float] = CandidateBudget(draft_len).hit_chances(draft_len)

    def num_guesses(self, num_rows: int, draft_len: int | None = None) -> int:
        """Verdicts to guess in a round in which `num_rows` rows decode and up to `draft_len` tokens of each are
        drafted, as many as there may be where it is left out; prompts may end in one without any row."""
        chosen = 0
        if self._steps and draft_len != 0:
            load = self._load(max(1, num_rows), draft_len)
            chosen = self._choose(load, max(1, num_rows))
            load.rounds += 1
            load.last_tried[chosen] = load.rounds
        self._guesses = chosen, self._guesses[0]
        return chosen

    def _choose(self, load: AheadLoad, num_rows: int) -> int:
        """The number of guesses that gives most tokens a second, as far as is known."""
        known = load.ahead()
        enough = enough_guesses(self._steps, num_rows)
        first = next((step for step in enough if step >= num_rows * FIRST_GUESSES_PER_ROW), enough[-1])
        if not known.keys() & set(enough):
            return first
        # What nothing is known of is tried where it might be best, one step at a time.
        near = {at + beside for at, step in enumerate(enough) if step in known for beside in (-1, 0, 1)}
        redrafting, beside = load.redrafting(), load.beside()
        shortest = statistics.median(load.verifying) if load.verifying else min(known.values())
        seconds_of, rates, at_best = {}, {}, {}
        for at in sorted(near & set(range(len(enough)))):
            step = enough[at]
            # One that is not known takes as long as fewer do, at least.
            seconds_of[step] = known.get(step, max((known[less] for less in enough[:at] if less in known), default=0.0))
            seconds_of[step] = max(seconds_of[step], shortest)
            rates[step] = self._rate(step, num_rows, seconds_of[step], redrafting)
            at_best[step] = self._rate(step, num_rows, shortest, redrafting)
        if beside and not self._always_guesses:
            seconds_of[0], rates[0] = beside, self._with_draft / beside
            at_best[0] = self._with_draft / (shortest + redrafting)
        best = max(rates, key=rates.__getitem__, default=first)
        for step, seconds in seconds_of.items():
            due = load.last_tried.get(step, 0) + _ROUNDS_TO_RETRY * seconds / seconds_of[best]
            is_due = load.rounds >= max(due, load.last_retry + _ROUNDS_TO_RETRY)
            if step != best and at_best[step] > rates[best] and is_due:
                load.last_retry = load.rounds
                return step
        return best

    def _rate(self, num_guesses: int, num_rows: int, seconds: float, redrafting: float) -> float:
        """Tokens that a row gains in a second where so many guesses are made for all rows, and rounds take `seconds`
        without a fresh draft: none is ever made, or one whenever a row misses, whom all wait for."""
        chance, with_draft = self._chance(num_guesses, num_rows), self._with_draft
        never = (1 + chance * (with_draft - 1)) / seconds
        if not redrafting:
            return never
        always = with_draft / (seconds + (1 - chance**num_rows) * redrafting)
        return always if self._always else max(never, always)

    @property
    def _with_draft(self) -> float:
        """Tokens of a row that has a draft, more than 1: a little where drafts gain nothing, and half of what they may
        where nothing is known."""
        return max(1.01, self._tokens_with_draft or 1 + self._draft_len / 2)

    def _chance(self, num_guesses: int, num_rows: int) -> float:
        """How likely a row's verdict is among so many guesses for all rows, by what was told and what was seen."""
        ratio = self._num_hits / self._expected_hits if self._has_looked else _HOPED
        return min(_SUREST, ratio * self._told_chance(num_guesses, num_rows))

    def _told_chance(self, num_guesses: int, num_rows: int) -> float:
        if num_guesses < num_rows:
            return self._hit_chances[0] * num_guesses / num_rows
        return self._hit_chances[min(num_guesses // num_rows, len(self._hit_chances)) - 1]

    def redraft_threshold(self, num_rows: int, draft_len: int | None = None) -> int:
        """Rows without a draft from which on a fresh one is worth its wait; asked once a round, behind
        `num_guesses`."""
        load = self._load(max(1, num_rows), draft_len)
        if self._always or self._guesses[1] == 0:
            return 1
        redrafting = load.redrafting()
        if not redrafting or not load.tokens_per_second:
            return NEVER if load.lacks_ready() else 1
        needed = redrafting * load.tokens_per_second / (self._with_draft - 1)
        if needed <= num_rows:
            return max(1, round(needed + 0.5))
        # Nothing is learned of drafts that are never made, so one is made again now and then.
        load.rounds_without_redraft += 1
        return NEVER if load.rounds_without_redraft % _ROUNDS_TO_RETRY else 1

    def record_chances(self, hit_chances: Sequence[float]) -> None:
        """Take in what `CandidateBudget.hit_chances` gives of a whole draft; nothing where it is not told."""
        if hit_chances and self._steps:
            self._hit_chances = hit_chances
            self._num_hits = self._expected_hits = _PRIOR_HITS

    def record_round(self, finished: AheadRound) -> None:
        """Take in a round's result."""
        load = self._load(finished.num_rows, finished.draft_len)
        load.record(finished)
        if finished.num_guesses:
            self._has_looked = True
            self._expected_hits += finished.num_rows * self._told_chance(finished.num_guesses, finished.num_rows)
            self._num_hits += finished.num_hits
        if finished.num_guesses is not None and finished.seconds > 0:
            rate = sum(finished.num_tokens) / finished.seconds
            load.tokens_per_second = _blend(load.tokens_per_second, rate)
        of_rows = zip(finished.num_tokens, finished.draft_lens, strict=True)
        with_draft = [count for count, length in of_rows if length > 0]
        if with_draft:
            self._tokens_with_draft = _blend(self._tokens_with_draft, statistics.fmean(with_draft))

    def _load(self, num_rows: int, draft_len: int | None) -> AheadLoad:
        """The load of so many rows, to a power of two, and of a draft_len, the longest where it is left out."""
        rows, length = 1 << max(0, num_rows - 1).bit_length(), draft_len or self._draft_len
        load = self._loads.get((rows, length))
        if load is None:
            load = self._loads[rows, length] = AheadLoad()
            costs = costs_between(self._costs, rows)
            if costs is not None:
                load.begin_with(costs if length == self._draft_len else costs.of_shorter(length / self._draft_len))
        return load


def _blend(old: float, new: float) -> float:
    return new if not old else _MEMORY * old + (1 - _MEMORY) * new
