"""Rounds that the orchestrator runs before the first request: to measure what rounds cost on this machine, as loaded as
it is, and so that no request has to wait for the first use of something. They go through the same ranks, messages and
engines as every other, pipelined alike.

Rows are made up, and their block tables are empty, so that what is written goes to the null block; behind the last
round they are dropped. It knows ranks, plans and a clock. It does not know what follows from the times
(speculation/pacing.py, ahead_rounds.py).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, takewhile

import numpy as np

from trtrun.core.guide import Guide
from trtrun.core.nouns import FIRST_WARM_UP_ROUND, PrefillChunk, RoundPlan, RowAdmission
from trtrun.core.sampling_params import SamplingParams
from trtrun.loading.model_settings import MADE_UP_LENGTH, MADE_UP_ROUNDS
from trtrun.rounds.commit import ahead_round
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import most_missed_rounds
from trtrun.speculation.ahead.ahead_costs import AheadRound
from trtrun.speculation.round_costs import RoundCosts
from trtrun.wire.reports import RoundReport

NUM_TIMED = MADE_UP_ROUNDS - 1
"""Rounds of a kind that count, at most; the first of each, which may be the first use of something, does not."""

_MOST_SECONDS = 0.5
"""That measuring takes, on two cores a second of the processor: no kind of round is begun that would not be done by
then."""

_SAMPLING = SamplingParams(seed=0)
_GUIDE = Guide("regex", "[a-z]*")
_PRACTISED = (
    _SAMPLING,
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=0),
    SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, seed=0),
    SamplingParams(seed=0, guided=_GUIDE),
    SamplingParams(temperature=1.0, seed=0, guided=_GUIDE),
)
"""How rows choose in the rounds that are run for their first uses."""

_MOST_PRACTISED = 16
"""The longest drafts there."""

_PROMPT = 16
"""Tokens of a prompt there."""

_LATE_ROWS = 4
"""The most rows there whose drafts come after many rounds without any."""

_LONGEST_PROMPT = 4096
"""Of one that fills a round: more would make the start of a large model seconds longer."""
_NONE = np.zeros(0, dtype=np.int32)
_NOTHING = RoundPlan(0, (), (), np.zeros((0, 3), dtype=np.int32), (), _NONE, _NONE, _NONE, max_context=1)
"""A round in which nobody runs."""


def measure_round_costs(
    ranks: EngineRanks,
    limits: SchedulerLimits,
    assumed: RoundCosts,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundCosts | None:
    """Run rounds of one row, of the most, and of numbers between, each without a draft and with short and long ones, as
    far as there is time.

    Args:
        ranks: all up, with no plan out and no row admitted.
        limits: of the batch, the context, and of what is drafted.
        assumed: tells how long a kind of round may take from how long another one took.
        clock: seconds.

    Returns:
        What they took, medians; None where contexts are too short to try, or two rounds take too long.

    Raises:
        RankFailedError: a rank failed.
    """
    lens, length = measured_lens(limits), row_length(limits, 1 + NUM_TIMED)
    if not lens:
        return None
    rounds = WarmUpRounds(ranks, limits, length, clock)
    seconds: dict[int, dict[int, float]] = {}
    ends, scale = clock() + _MOST_SECONDS, 0.0
    with ranks.stepping():
        for rows in measured_rows(limits):
            for draft_len in (0, *reversed(lens[1:])):
                expected = scale * assumed.estimate(rows, draft_len)
                num_timed = min(NUM_TIMED, int((ends - clock()) / expected) - 1) if expected else 1
                if num_timed < 1:
                    continue
                took = rounds.measure(rows, draft_len, num_timed)
                seconds.setdefault(rows, {})[draft_len] = took
                scale = max(scale, took / assumed.estimate(rows, draft_len))
        rounds.drop_rows()
    whole = {rows: dict(sorted(of_rows.items())) for rows, of_rows in sorted(seconds.items()) if _is_whole(of_rows)}
    return RoundCosts(whole) if whole else None


def _is_whole(of_rows: Mapping[int, float]) -> bool:
    """Whether rounds of a number of rows were measured with drafts and without."""
    return 0 in of_rows and len(of_rows) > 1


def practise_rounds(ranks: EngineRanks, limits: SchedulerLimits) -> None:
    """Run a prompt that fills a round, and a round of each draft_len, of a row that decodes and a prompt beside it, for
    each way to choose.

    Args:
        ranks: all up, with no plan out and no row admitted.
        limits: of the batch, the context, and of what is drafted.

    Raises:
        RankFailedError: a rank failed.
    """
    lens = _practised_lens(limits)
    if not lens:
        return
    rounds = WarmUpRounds(ranks, limits, row_length(limits, len(lens)), time.perf_counter)
    with ranks.stepping():
        rounds.practise_longest_prompt()
        for sampling in _PRACTISED:
            for draft_len in lens:
                rounds.practise(draft_len, sampling)
        for rows in _late_rows(limits):
            rounds.practise_late_drafts(rows)
            rounds.practise_few_drafts(rows)
        rounds.drop_rows()


def count_practised_rounds(limits: SchedulerLimits) -> int:
    """Rounds that `practise_rounds` runs, but for the one that drops rows."""
    lens = _practised_lens(limits)
    beside = _has_prompt(limits, row_length(limits, len(lens)))
    of_kinds = len(_PRACTISED) * len(lens) * (2 if beside else 1)
    return of_kinds + 1 + 3 * len(_late_rows(limits)) if lens else 0


def count_measured_rounds(limits: SchedulerLimits) -> int:
    """Rounds that `measure_round_costs` runs, but for the one that drops rows: at most, as it ends early where rounds
    take long."""
    kinds = len(list(measured_rows(limits))) * len(measured_lens(limits))
    return max(0, kinds * (1 + NUM_TIMED) - (NUM_TIMED - 1))  # of the first kind one is timed: it may be slow


def _practised_lens(limits: SchedulerLimits) -> list[int]:
    """None where contexts are too short."""
    most = min(limits.draft_len, _MOST_PRACTISED)
    return list(range(most + 1)) if row_length(limits, 1 + most) >= 2 else []


def _late_rows(limits: SchedulerLimits) -> list[int]:
    """Numbers of rows whose drafts after many rounds without any are practised: those that are left out longest."""
    if not (limits.draft_len and limits.has_draft_store and limits.may_sit_out):
        return []
    return sorted({1, min(_LATE_ROWS, limits.max_batch_size)})


def measured_lens(limits: SchedulerLimits) -> list[int]:
    """None where nothing is drafted, or contexts are too short."""
    lens = sorted({0, 1, limits.draft_len // 2, limits.draft_len})
    return lens if len(lens) > 1 and row_length(limits, 1 + NUM_TIMED) >= 2 else []


def row_length(limits: SchedulerLimits, rounds: int) -> int:
    """Tokens of a made-up row with room behind them for so many rounds."""
    return min(MADE_UP_LENGTH, _context(limits) - rounds * (limits.draft_len + 1))


def _context(limits: SchedulerLimits) -> int:
    """Tokens of a row of targets and drafts."""
    return min(context for context in (limits.max_seq_len, limits.draft_max_seq_len) if context is not None)


def _longest_prompt(limits: SchedulerLimits) -> int:
    """Tokens of a prompt that fills a round: whole tiles, as rounds read them, where there is more than one."""
    bounds = (limits.max_num_tokens, limits.most_chunk, _context(limits) - 1, _LONGEST_PROMPT)
    length, tile = min(bound for bound in bounds if bound is not None), limits.prompt_tile or 1
    return length - length % tile if length > tile else length


def _has_prompt(limits: SchedulerLimits, length: int) -> bool:
    """Whether a prompt is practised beside a row of `length` tokens."""
    return limits.max_batch_size > 1 and length > _PROMPT


def measured_rows(limits: SchedulerLimits) -> Iterator[int]:
    """Numbers of rows that a round has room for."""
    of_row = limits.num_verified(limits.draft_len)
    return takewhile(lambda rows: rows * of_row <= limits.max_num_tokens, numbers_of_rows(limits.max_batch_size))


def numbers_of_rows(most: int) -> list[int]:
    """One and the most first: what lies between them can be told from these, too."""
    between, rows = [], 4
    while rows < most:
        between.append(rows)
        rows *= 4
    return [*dict.fromkeys((1, most)), *between]


class WarmUpRounds:
    """Plans for made-up rows, and the times of their verdicts."""

    def __init__(self, ranks: EngineRanks, limits: SchedulerLimits, length: int, clock: Callable[[], float]) -> None:
        self._ranks = ranks
        self._limits = limits
        self._length = length
        self._clock = clock
        self._last_index = FIRST_WARM_UP_ROUND
        self._num_admitted = 0

    def measure(self, rows: int, draft_len: int, num_timed: int) -> float:
        """The median seconds of `num_timed` rounds of `rows` rows that draft `draft_len` tokens each."""
        return statistics.median_low(took for _, _, took in self._run(rows, draft_len, 1 + num_timed)[1:])

    def measure_ahead(self, rows: int, num_guesses: int, count: int) -> list[AheadRound]:
        """All but the first of `count` rounds of `rows` rows with whole drafts, in which so many verdicts are guessed,
        and whoever missed is drafted for again."""
        ran = self._run(rows, self._limits.draft_len, count, num_guesses)
        return [ahead_round(before, plan, report, took) for (before, _, _), (plan, report, took) in pairwise(ran)]

    def _run(
        self, rows: int, draft_len: int, count: int, num_guesses: int = 0
    ) -> list[tuple[RoundPlan, RoundReport, float]]:
        """Run so many rounds of a kind; of each its plan, the report of its verdict, and its seconds."""
        published, ran = deque[tuple[RoundPlan, float]](), list[tuple[RoundPlan, RoundReport, float]]()
        last, num_published = 0.0, 0
        while len(ran) < count:
            while num_published < count and len(published) <= self._limits.plans_ahead:
                plan = replace(self._plan(rows, draft_len, num_published), num_guesses=num_guesses)
                self._ranks.publish(plan)
                published.append((plan, self._clock()))
                num_published += 1
            report, received = self._await_verdict(), self._clock()
            plan, began = published.popleft()
            ran.append((plan, report, received - max(last, began)))
            last = received
        return ran

    def practise_longest_prompt(self) -> None:
        """One that fills a round. After it the allocator has the memory of such a round, and sums over ranks have their
        links for such sizes, for which the first user would wait."""
        length = _longest_prompt(self._limits)
        alone = self._plan(1, 0, 0)
        tokens = np.zeros(length, dtype=np.int32)
        admission = replace(alone.admissions[0], tokens=tokens, num_prompt_tokens=length)
        chunk = PrefillChunk(0, 0, length, is_last=True, has_draft_kv=admission.has_draft_kv)
        plan = replace(
            alone,
            admissions=(admission,),
            prefill=(chunk,),
            decode_rows=_NONE,
            draft_lens=_NONE,
            catch_up=_NONE,
            max_context=length + 1,
        )
        self._ranks.publish(plan)
        self._await_verdict()

    def practise(self, draft_len: int, sampling: SamplingParams) -> None:
        """A round of a row that drafts `draft_len` tokens, and one with a prompt that ends in it."""
        plan = self._plan(1, draft_len, 0, sampling)
        self._ranks.publish(plan)
        self._await_verdict()
        if _has_prompt(self._limits, self._length):
            self._num_admitted = 2
            tokens = np.zeros(_PROMPT, dtype=np.int32)
            admission = replace(plan.admissions[0], row=1, request_id=1, tokens=tokens, num_prompt_tokens=_PROMPT)
            chunk = PrefillChunk(1, 0, _PROMPT, is_last=True, has_draft_kv=plan.admissions[0].has_draft_kv)
            self._ranks.publish(replace(self._plan(1, draft_len, 1), admissions=(admission,), prefill=(chunk,)))
            self._await_verdict()

    def practise_late_drafts(self, rows: int) -> None:
        """A round of rows whose draft store lacks as much as it ever does, which it is fed in parts."""
        plan = self._plan(rows, 1, 0)
        lacking = np.full(rows, most_missed_rounds(rows, may_sit_out=True), dtype=np.int32)
        self._ranks.publish(replace(plan, catch_up=lacking))
        self._await_verdict()

    def practise_few_drafts(self, rows: int) -> None:
        """A round in which one of these rows drafts, and one in which it is fed alone; the others sit them out."""
        first = np.arange(rows, dtype=np.int32) == 0
        for number, draft_len in enumerate((1, 0)):
            plan = self._plan(rows, 1, number)
            lens, unfed = np.where(first, draft_len, -1), np.where(first, self._limits.most_unfed(1), 0)
            few = replace(plan, draft_lens=lens.astype(np.int32), catch_up=unfed.astype(np.int32))
            self._ranks.publish(few)
            self._await_verdict()

    def drop_rows(self) -> None:
        """Leave the ranks as they were."""
        self._ranks.publish(replace(_NOTHING, round_index=self._index(), dropped_rows=tuple(range(self._num_admitted))))
        self._await_verdict()

    def _await_verdict(self) -> RoundReport:
        while not (report := self._ranks.collect()).is_verdict:
            pass  # the draft leader's, which tells its times
        return report

    def _index(self) -> int:
        self._last_index += 1
        return self._last_index

    def _plan(self, rows: int, draft_len: int, number: int, sampling: SamplingParams = _SAMPLING) -> RoundPlan:
        """Round `number` of a kind; the first admits its rows anew."""
        follows = self._limits.has_draft_store
        plan = replace(
            _NOTHING,
            round_index=self._index(),
            decode_rows=np.arange(rows, dtype=np.int32),
            draft_lens=np.full(rows, draft_len, dtype=np.int32),
            catch_up=np.full(rows, self._limits.most_unfed(draft_len) if follows and draft_len else 0, dtype=np.int32),
            max_context=self._length + (number + 1) * (draft_len + 1),
        )
        if number:
            return plan
        tokens = np.zeros(self._length, dtype=np.int32)
        dropped, self._num_admitted = tuple(range(self._num_admitted)), rows
        admissions = [RowAdmission(row, row, tokens, self._length, 0, follows, sampling) for row in range(rows)]
        return replace(plan, dropped_rows=dropped, admissions=tuple(admissions))
