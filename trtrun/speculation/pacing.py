"""How many tokens to draft in a round: what pays most under the present load, by what the run itself measured.

Verifying a few rows costs hardly more than decoding them, as both wait for the weights. With many rows verification is
arithmetic, and a draft_len that is right for one row loses more time than its accepted tokens win. The pacer keeps how
long rounds of each draft_len took under each load, and how often the draft token of each position was accepted, and
answers with the draft_len of the most tokens a second to be expected. That is the goodput of Liu et al. 2024
(arXiv:2406.14066). It begins with what the start measured (round_costs.py), where it did, and corrects that by what
rounds take; else it learns all of it on the way.

It knows numbers of rows, seconds and counts. It does not know requests, clocks, models or what a plan makes of its
answer. No text depends on the answer: acceptance by token is lossless for any draft_len.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trtrun.speculation.round_costs import RoundCosts

_NUM_SAMPLES = 16
"""Times kept for a draft_len under a load; their lower quartile counts. What slows some rounds down, another program or
caches that a change of draft_len has emptied, says nothing of the others, and would be remembered for long of a
draft_len that is not in use."""

_FEWEST_SAMPLES = 2
_FIRST_TRIAL, _FIRST_TRIAL_OF_KNOWN = 8, 16
_LONGEST_PAUSE = 512
"""Rounds of a load before the first trial of another draft_len, without and with costs that the start measured, and
most rounds between two: a trial that changes nothing doubles the pause, one that does brings it back to the first."""

_PLAIN_ROUNDS = 64
"""Rounds before the first trial where nothing should be drafted by the costs: a draft that fails costs most there."""

_TRIAL_ROUNDS = 2
_REVIEW_EVERY = 8
"""Rounds between two looks at what is known, outside trials."""

_WORTH_A_CHANGE = 1.03
"""How many times the present goodput another draft_len must promise."""

_PLAIN_TOGETHER = 1.05
"""What rounds without drafts gain where several rows run: those that began together end together, while rows that
draft end one after the other, so that their last rounds are of few rows."""

_MEMORY = 0.98
"""What is kept of older acceptances with every round that brings new ones: the last fifty rounds weigh most."""

_PRIOR_ACCEPTANCE, _PRIOR_OFFERS = 0.8, 0.5
_FEWEST_DRAFTS = 4
"""That are asked for before none are made: one first token of a good draft is rejected now and then. They have one
token until the first of them is verified, and afterwards where a longer one does not seem to pay, which costs little
with a draft that is never right."""

_ROWS_ON_TRIAL = 16
"""Of more rows so many draft where it is only to be learned how often drafts are right: that does not follow from how
many there are, while feeding all that a draft model lacks of each row takes long."""

_HOPELESS_ROUNDS = 128
"""Rounds that drafts did not seem to be worth in, after which they are not expected to pay soon."""

_SURELY_HOPELESS_ROUNDS = 4
_SURE_DRAFTS, _RARELY = 16, 0.05
"""The same where of so many drafts first tokens were kept as seldom as that: little is left to be learned."""

_TRUST = 1
"""As much as so many samples of one draft_len counts what all of a load say of the measured costs."""


@dataclass(slots=True)
class _Load:
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

    def known_seconds(self) -> dict[int, float]:
        """Seconds of a round by draft_len, in order of draft_len, where there are samples enough."""
        return {
            draft_len: _typical(samples)
            for draft_len, samples in sorted(self.seconds.items())
            if len(samples) >= _FEWEST_SAMPLES
        }

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


def first_trial(draft_len: int) -> int:
    """What every load tries first beside the configured `draft_len`: rounds of it are sure to come."""
    return draft_len // 2


class Pacer:
    """Chooses draft_len, between 0 and the configured one, from what rounds took and what was accepted."""

    def __init__(self, draft_len: int, costs: RoundCosts | None = None) -> None:
        """Start with `costs`; without them `draft_len`, the configured one, is the answer until something is known."""
        self._most = draft_len
        self._costs = costs
        self._num_asked = 0
        self._num_drafts = 0
        self._rounds_without = 0
        self._loads: dict[tuple[int, int], _Load] = {}
        self._offered = [_PRIOR_OFFERS] * draft_len
        self._accepted = [_PRIOR_ACCEPTANCE * _PRIOR_OFFERS] * draft_len

    def choose(self, num_rows: int, num_plain: int = 0) -> int:
        """Tokens to draft for each row in the next round, in which `num_rows` rows decode, `num_plain` of them without
        drafts."""
        load = self._load(num_rows, num_plain)
        if load.trial_left:
            return load.trial
        if not load.costs or max(self._num_asked, self._num_drafts) >= _FEWEST_DRAFTS:
            return load.current if self._num_drafts or not load.costs else min(1, load.current)
        return max(1, load.current) if self._num_drafts else 1

    def note_plan(self, num_drafting: int) -> None:
        """A plan is out in which tokens are drafted for so many rows: their verdicts will say more."""
        self._num_asked += num_drafting

    def most_drafting(self, num_rows: int, num_plain: int = 0) -> int | None:
        """Rows that are to draft what `choose` has just said, where these are fewer than there are: it is to be learned
        how often drafts are right, and what rounds with them take is known well enough. None for all."""
        load = self._load(num_rows, num_plain)
        if not load.costs or num_rows <= _ROWS_ON_TRIAL:
            return None
        return None if load.current and self._num_drafts else _ROWS_ON_TRIAL

    @property
    def pays(self) -> bool:
        """Whether drafting has been worth while lately."""
        is_sure = self._num_drafts >= _SURE_DRAFTS and self._accepted[0] < _RARELY * self._offered[0]
        return self._rounds_without < (_SURELY_HOPELESS_ROUNDS if is_sure else _HOPELESS_ROUNDS)

    def record(
        self,
        num_rows: int,
        draft_len: int,
        seconds: float | None,
        acceptances: Sequence[tuple[int, int]],
        num_plain: int = 0,
        is_partial: bool = False,
    ) -> None:
        """Take in a round's result.

        Args:
            num_rows: rows that decoded.
            draft_len: most tokens that were drafted for a row.
            seconds: how long the round took; None where it did other work, too, or where nothing can be told.
            acceptances: for each row with drafts, how many tokens were drafted and how many of them accepted.
            num_plain: rows that nothing was to be drafted for.
            is_partial: whether no more rows were to draft than `most_drafting`, so that the time is no other round's.
        """
        self._record_acceptances(acceptances)
        self._num_drafts += len(acceptances)
        if seconds is None:
            return
        load = self._load(num_rows, num_plain)
        if draft_len and load.current:  # else it was tried: plans that are out already, too, when a trial ends
            self._rounds_without = 0
        elif num_plain < num_rows:
            self._rounds_without += 1
        load.rounds += 1
        if not is_partial:
            load.seconds.setdefault(draft_len, deque(maxlen=_NUM_SAMPLES)).append(seconds)
        load.last_seen[draft_len] = load.rounds
        if load.trial_left:
            load.trial_left -= 1
            if not load.trial_left:
                load.pause = min(2 * load.pause, _LONGEST_PAUSE)
                self._review(load)
                load.next_trial = load.rounds + load.pause
            return
        if load.rounds % _REVIEW_EVERY == 0 or (load.costs and load.rounds < 2 * _REVIEW_EVERY):
            self._review(load)
        if load.rounds >= load.next_trial and (load.current or not load.costs or load.rounds >= _PLAIN_ROUNDS):
            load.trial, load.trial_left = self._trial(load), _TRIAL_ROUNDS

    def expected_tokens(self, draft_len: int) -> float:
        """Tokens that a row is expected to gain in a round: 1, and each draft token that all before it let through."""
        tokens, chance = 1.0, 1.0
        for place in range(draft_len):
            chance *= self._accepted[place] / self._offered[place]
            tokens += chance
        return tokens

    def _load(self, num_rows: int, num_plain: int) -> _Load:
        """The load of so many rows: exact to 4, then four to a power of two. A new one begins with what is best by
        the costs, and without them as the nearest does."""
        rows, plain = _rounded(num_rows), _rounded(num_plain)
        load = self._loads.get((rows, plain))
        if load is None:
            nearest = min(self._loads, key=lambda key: abs(key[0] - rows) + abs(key[1] - plain), default=None)
            current = self._most if nearest is None else self._loads[nearest].current
            costs: list[float] = []
            if self._costs is not None and self._costs.covers(num_rows):
                costs = [self._costs.estimate(num_rows, draft_len) for draft_len in range(self._most + 1)]
            pause = _FIRST_TRIAL_OF_KNOWN if costs else _FIRST_TRIAL
            load = _Load(rows, max(0.0, 1 - plain / rows), current, pause, pause, costs)
            self._loads[rows, plain] = load
            if costs:
                goodput = self._goodput(load, costs)
                load.current = goodput.index(max(goodput))
        return load

    def _record_acceptances(self, acceptances: Sequence[tuple[int, int]]) -> None:
        offered_below, accepted_below = [0] * (self._most + 1), [0] * (self._most + 1)
        for drafted, accepted in acceptances:
            # Verification stops at a rejection: a position is offered where everything before it was accepted.
            offered_below[min(drafted, accepted + 1)] += 1
            accepted_below[accepted] += 1
        offered = kept = 0
        for place in reversed(range(self._most)):
            offered += offered_below[place + 1]
            kept += accepted_below[place + 1]
            if offered:
                self._offered[place] = self._offered[place] * _MEMORY + offered
                self._accepted[place] = self._accepted[place] * _MEMORY + kept

    def _review(self, load: _Load) -> None:
        """Take the draft_len of the highest goodput; leave the present one unless another is clearly better."""
        if load.costs:
            seconds = load.expected_seconds()
        else:
            known = load.known_seconds()
            if len(known) < 2:
                return
            seconds = [_estimate(known, draft_len) for draft_len in range(self._most + 1)]
        goodput = self._goodput(load, seconds)
        best = goodput.index(max(goodput))
        if goodput[best] > _WORTH_A_CHANGE * goodput[load.current]:
            load.current, load.pause = best, _FIRST_TRIAL if not load.costs else _FIRST_TRIAL_OF_KNOWN
            load.next_trial = min(load.next_trial, load.rounds + load.pause)

    def _goodput(self, load: _Load, seconds: Sequence[float]) -> list[float]:
        """What a row is expected to gain in a second, by draft_len, where rounds take `seconds`: tokens, and of plain
        ones a little more (`_PLAIN_TOGETHER`)."""
        gains = (load.share_drafted * (self.expected_tokens(draft_len) - 1) for draft_len in range(len(seconds)))
        plain, *drafted = ((1 + gain) / took for gain, took in zip(gains, seconds, strict=True))
        return [plain if load.num_rows == 1 else _PLAIN_TOGETHER * plain, *drafted]

    def _trial(self, load: _Load) -> int:
        """The draft_len to try next: no draft where rounds without one were never seen, as what the start measured may
        be off by another part for them; one far off at first where it measured nothing; then the neighbour that was
        seen least recently."""
        if load.costs and 0 not in load.seconds:
            return 0
        if not load.costs and len(load.known_seconds()) < 2:
            half = first_trial(self._most)
            return half if half != load.current else self._most
        neighbours = [value for value in (load.current - 1, load.current + 1) if 0 <= value <= self._most]
        return min(neighbours, key=lambda draft_len: load.last_seen.get(draft_len, 0))


def _typical(samples: Iterable[float]) -> float:
    """The lower quartile."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]


def _nearest(places: Iterable[int], place: int) -> int:
    return min(places, key=lambda one: abs(one - place))


def _rounded(num_rows: int) -> int:
    """A number of rows, to a quarter of a power of two."""
    step = max(1, 1 << max(0, (num_rows - 1).bit_length() - 3))
    return -(-num_rows // step) * step


def _estimate(known: dict[int, float], draft_len: int) -> float:
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
