"""How many tokens to draft in a round: what pays most under the present load, by what the run itself measured.

Verifying a few rows costs hardly more than decoding them, as both wait for the weights. With many rows verification is
arithmetic, and a draft_len that is right for one row loses more time than its accepted tokens win. The pacer keeps how
long rounds of each draft_len took under each load (round_costs.py), and how often the draft token of each position was
accepted (acceptance.py), and answers with the draft_len of the most tokens a second to be expected. That is the goodput
of Liu et al. 2024 (arXiv:2406.14066). It begins with what the start measured or assumed (round_costs.py) and with what
an earlier run has seen, and corrects both by what comes; where it has no costs, it learns all of it on the way.

Nobody knows of a new draft whether it is any good. What it may cost before it has earned anything is a stake, bounded
whatever is drafted: as a gambler's who bets a share of what he has left, and plays on with what he wins.

It knows numbers of rows, seconds and counts. It does not know requests, clocks, models or what a plan makes of its
answer. No text depends on the answer: acceptance by token is lossless for any draft_len.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

from trtrun.speculation.acceptance import DraftRecord, PositionAcceptance
from trtrun.speculation.round_costs import NUM_SAMPLES, Load, RoundCosts, estimate_between, rounded

_FIRST_TRIAL, _FIRST_TRIAL_OF_KNOWN = 8, 16
_LONGEST_PAUSE, _LONGEST_WITHOUT = 512, 128
"""Rounds of a load before the first trial of another draft_len, without and with costs that the start measured, and
most rounds between two, where tokens are drafted and where none are: a trial that changes nothing doubles the pause,
one that does brings it back to the first."""

_PLAIN_ROUNDS = 64
"""Rounds before the first trial where nothing should be drafted by the costs: a draft that fails costs most there; and
where an earlier run has seen drafts, and what rounds with them take."""

_TRIAL_ROUNDS = 2
_REVIEW_EVERY = 8
"""Rounds between two looks at what is known, outside trials."""

WORTH_A_CHANGE = 1.03
"""How many times the present goodput another draft_len must promise."""

PLAIN_TOGETHER = 1.05
"""What rounds without drafts gain where several rows run: those that began together end together, while rows that
draft end one after the other, so that their last rounds are of few rows."""

_FEWEST_DRAFTS = 4
"""Drafts that are asked for before none are made: one first token of a good draft is rejected now and then."""

_COSTS_MAY_BE_OFF = 1.5
"""How many times as good as expected another draft_len may be, of which the start has measured what rounds take; more
where that was wrong for the present one."""

_STAKE, _REMEMBERED_STAKE, _MOST_STAKE = 0.75, 2.0, 4.0
_STAKED_AT_ONCE = 0.5
_EARNED = 0.01
"""What drafts may cost beyond what they gain, in rounds without any: at first, where an earlier run found
drafts worth it, and at most; the share of it that a
single round may cost; and what each round without drafts adds. So a draft that is never right costs a round of a text,
whatever its length, and a hundredth of the time later; while a good one soon earns more than it will ever stake."""

_ROWS_ON_TRIAL = 8
"""Rows, of more, that draft where it is only to be learned how often drafts are right: that does not follow from how
many there are, while feeding all that a draft model lacks of each row takes long."""

_HOPELESS_ROUNDS = 128
"""Rounds that drafts did not seem to be worth in, after which they are not expected to pay soon."""

_SURELY_HOPELESS_ROUNDS = 2
_SURE_DRAFTS, _RARELY = 8, 0.05
"""As _ROWS_ON_TRIAL, where of so many drafts first tokens were kept as seldom as that: little is left to be learned."""


def first_trial(draft_len: int) -> int:
    """What every load tries first beside the configured `draft_len`: rounds of it are sure to come."""
    return draft_len // 2


class Pacer:
    """Chooses draft_len, between 0 and the configured one, from what rounds took and what was accepted."""

    def __init__(self, draft_len: int, costs: RoundCosts | None = None, record: DraftRecord | None = None) -> None:
        """Start with `costs`; without them `draft_len`, the configured one, is the answer until something is known.
        `record` is what an earlier run has seen of drafts; None where there was none."""
        self._most = draft_len
        self._costs = costs
        self._num_asked = 0
        self._num_drafts = 0
        self._rounds_without = 0
        self._loads: dict[tuple[int, int], Load] = {}
        self._acceptance = PositionAcceptance.unknown(draft_len)
        self._stake = _STAKE
        self._is_known = record is not None
        if record is not None:
            self._acceptance.remember(record.offered, record.accepted)
            if record.pays:
                self._stake = max(_STAKE, min(record.stake, _REMEMBERED_STAKE))
            elif self._is_surely_bad:
                self._rounds_without = _HOPELESS_ROUNDS

    @property
    def seen(self) -> DraftRecord:
        """What this run, and others before, have seen of drafts."""
        acceptance = self._acceptance
        return DraftRecord(tuple(acceptance.offered), tuple(acceptance.accepted), self._stake, self.pays)

    @property
    def seen_costs(self) -> RoundCosts | None:
        """What rounds have taken, as far as this run has seen; else as many times as it was told. None where it has
        seen too little."""
        loads = {
            rows: load for (rows, plain), load in self._loads.items() if not plain and len(load.known_seconds()) > 1
        }
        if self._costs is None or not loads:
            return None
        seen = {rows: load.expected_seconds() for rows, load in loads.items()}
        ratio = median_low(seen[rows][0] / load.costs[0] for rows, load in loads.items())
        found: dict[int, dict[int, float]] = {
            rows: {length: seconds * ratio for length, seconds in of_rows.items()}
            for rows, of_rows in self._costs.seconds.items()
        }
        found |= {rows: dict(enumerate(of_rows)) for rows, of_rows in seen.items()}
        return RoundCosts(dict(sorted(found.items())))

    def choose(self, num_rows: int, num_plain: int = 0) -> int:
        """Tokens to draft for each row in the next round, in which `num_rows` rows decode, `num_plain` of them without
        drafts."""
        load = self._load(num_rows, num_plain)
        wanted = load.trial if load.trial_left else load.current
        if not wanted and not load.trial_left and self.is_unsure and load.costs and self._num_asked < _FEWEST_DRAFTS:
            wanted = 1
        if wanted and load.extra:
            share, least = self._share_drafting(load, num_rows), self._acceptance.least_tokens()
            while wanted and not self._may_stake(wanted, share * (load.extra[wanted] + 1 - least[wanted])):
                wanted -= 1
        return wanted

    def note_plan(self, num_rows: int, num_plain: int, draft_len: int, num_drafting: int) -> None:
        """A plan is out in which up to `draft_len` tokens are drafted for `num_drafting` rows of those that `choose`
        was asked about: their verdicts will say more."""
        self._num_asked += num_drafting
        load = self._load(num_rows, num_plain)
        if num_drafting and load.extra:
            share = num_drafting / max(1, num_rows - num_plain)
            self._stake -= min(1.0, share) * max(0.0, load.extra[min(draft_len, self._most)])

    def most_drafting(self, num_rows: int, num_plain: int = 0) -> int | None:
        """Rows that are to draft what `choose` has just said, where these are fewer than there are: it is to be learned
        how often drafts are right, and what rounds with them take is known well enough. None for all."""
        load = self._load(num_rows, num_plain)
        if not load.costs or num_rows <= _ROWS_ON_TRIAL:
            return None
        return None if load.current and not self.is_unsure else _ROWS_ON_TRIAL

    @property
    def is_unsure(self) -> bool:
        """Whether too few drafts were verified, in this run and others before, to say anything of them."""
        return self._acceptance.num_seen < _FEWEST_DRAFTS

    @property
    def pays(self) -> bool:
        """Whether drafting has been worth while lately."""
        return self._rounds_without < (_SURELY_HOPELESS_ROUNDS if self._is_surely_bad else _HOPELESS_ROUNDS)

    @property
    def _is_surely_bad(self) -> bool:
        return self._acceptance.num_seen >= _SURE_DRAFTS and self._acceptance.first_rate() < _RARELY

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
        self._acceptance.record(acceptances)
        self._num_drafts += len(acceptances)
        gained = sum(accepted for _, accepted in acceptances) / max(1, num_rows)
        self._stake = min(_MOST_STAKE, self._stake + (gained if draft_len else _EARNED))
        if self._stake < 0:  # more was lost than such drafts ever should
            self._stake = 0.0
            self._acceptance.doubt()
        if seconds is None:
            return
        load = self._load(num_rows, num_plain)
        if draft_len and load.current:  # else it was tried: plans that are out already, too, when a trial ends
            self._rounds_without = 0
        elif num_plain < num_rows:
            self._rounds_without += 1
            if not self.pays:  # and so until drafts were worth it again
                self._rounds_without = max(self._rounds_without, _HOPELESS_ROUNDS)
        load.rounds += 1
        if not is_partial:
            load.seconds.setdefault(draft_len, deque(maxlen=NUM_SAMPLES)).append(seconds)
        load.last_seen[draft_len] = load.rounds
        if load.trial_left:
            load.trial_left -= 1
            if not load.trial_left:
                self._end_trial(load)
            return
        if load.rounds % _REVIEW_EVERY == 0 or (load.costs and load.rounds < 2 * _REVIEW_EVERY):
            self._review(load)
        if load.rounds >= load.next_trial and (load.current or not load.costs or load.rounds >= _PLAIN_ROUNDS):
            load.trial = self._trial(load)
            if load.trial == load.current:  # nothing that could be better
                self._end_trial(load)
            else:
                load.trial_left = _TRIAL_ROUNDS
                if not load.current:
                    self._acceptance.doubt()  # what was seen of drafts was seen long ago

    def _end_trial(self, load: Load) -> None:
        load.pause = min(2 * load.pause, _LONGEST_PAUSE if load.current else _LONGEST_WITHOUT)
        self._review(load)
        load.next_trial = load.rounds + load.pause

    def expected_tokens(self, draft_len: int) -> float:
        """Tokens that a row is expected to gain in a round: 1, and each draft token that all before it let through."""
        return self._acceptance.expected_tokens()[draft_len]

    def _load(self, num_rows: int, num_plain: int) -> Load:
        """The load of so many rows: exact to 4, then four to a power of two. A new one begins with what is best by
        the costs, and without them as the nearest does."""
        rows, plain = rounded(num_rows), rounded(num_plain)
        load = self._loads.get((rows, plain))
        if load is None:
            nearest = min(self._loads, key=lambda key: abs(key[0] - rows) + abs(key[1] - plain), default=None)
            current = self._most if nearest is None else self._loads[nearest].current
            costs: list[float] = []
            if self._costs is not None:
                costs = [self._costs.estimate(num_rows, draft_len) for draft_len in range(self._most + 1)]
            pause = _FIRST_TRIAL if not costs else _PLAIN_ROUNDS if self._is_known else _FIRST_TRIAL_OF_KNOWN
            load = Load(rows, max(0.0, 1 - plain / rows), current, pause, pause, costs)
            self._loads[rows, plain] = load
            if costs:
                goodput = self._goodput(load, costs)
                load.current = goodput.index(max(goodput))
        return load

    def _may_stake(self, draft_len: int, rounds: float) -> bool:
        """Whether a round may cost so much of the stake: all of it where one token is drafted, as less is nothing."""
        return rounds <= (self._stake if draft_len == 1 else _STAKED_AT_ONCE * self._stake)

    def _share_drafting(self, load: Load, num_rows: int) -> float:
        """The share of rows that `most_drafting` lets draft, of those that could."""
        is_tried = load.costs and num_rows > _ROWS_ON_TRIAL and (self.is_unsure or not load.current)
        return _ROWS_ON_TRIAL / num_rows if is_tried else 1.0

    def _review(self, load: Load) -> None:
        """Take the draft_len of the highest goodput; leave the present one unless another is clearly better."""
        if load.costs:
            seconds = load.expected_seconds()
        else:
            known = load.known_seconds()
            if len(known) < 2:
                return
            seconds = [estimate_between(known, draft_len) for draft_len in range(self._most + 1)]
        goodput = self._goodput(load, seconds)
        best = goodput.index(max(goodput))
        if goodput[best] > WORTH_A_CHANGE * goodput[load.current]:
            load.current, load.pause = best, _FIRST_TRIAL if not load.costs else _FIRST_TRIAL_OF_KNOWN
            load.next_trial = min(load.next_trial, load.rounds + load.pause)

    def _goodput(self, load: Load, seconds: Sequence[float]) -> list[float]:
        """What a row is expected to gain in a second, by draft_len, where rounds take `seconds`: tokens, and of plain
        ones a little more (`PLAIN_TOGETHER`). What they take beyond a plain one is noted."""
        load.extra = [took / seconds[0] - 1 for took in seconds]
        gains = (load.share_drafted * (tokens - 1) for tokens in self._acceptance.expected_tokens())
        plain, *drafted = ((1 + gain) / took for gain, took in zip(gains, seconds, strict=True))
        load.goodput = [plain if load.num_rows == 1 else PLAIN_TOGETHER * plain, *drafted]
        return load.goodput

    def _trial(self, load: Load) -> int:
        """The draft_len to try next: no draft where rounds without one were never seen, as what the start measured may
        be off by another part for them; one far off at first where it measured nothing; then the neighbour that was
        seen least recently. The present one where costs say of none that it may be better."""
        if not load.costs and len(load.known_seconds()) < 2:
            half = first_trial(self._most)
            return half if half != load.current else self._most
        places = [value for value in (load.current - 1, load.current + 1) if 0 <= value <= self._most]
        if load.costs:
            if 0 not in load.seconds:
                places = [0]
            least = load.goodput[load.current] / (_COSTS_MAY_BE_OFF * load.distance())
            places = [value for value in places if not load.current or load.goodput[value] > least]
        return min(places, key=lambda draft_len: load.last_seen.get(draft_len, 0), default=load.current)
