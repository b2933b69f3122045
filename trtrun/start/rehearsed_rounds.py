"""Rounds that the orchestrator runs before the first request, to measure what rounds cost on this machine, as loaded as
it is: through the same ranks, messages and engines as every other, pipelined alike.

Rows are made up, and their block tables are empty, so that what is written goes to the null block; behind the last
round they are dropped. It knows ranks, plans and a clock. It does not know what follows from the times
(speculation/pacing.py).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from trtrun.core.nouns import RoundPlan, RowAdmission
from trtrun.core.sampling_params import SamplingParams
from trtrun.roles.engine_ranks import EngineRanks
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.speculation.round_costs import RoundCosts

_FIRST_ROUND = 1 << 40
"""Index of the first of these rounds: those of requests count from 0, and never come so far."""

_LENGTH = 32
"""Tokens of a made-up row, where its context is not shorter."""

_NUM_TIMED = 3
"""Rounds of a kind that count; the first of each, which may be the first use of something, does not."""

_MOST_SECONDS = 0.5
"""After which no further number of rows is tried."""

_SAMPLING = SamplingParams(seed=0)
_NONE = np.zeros(0, dtype=np.int32)
_NOTHING = RoundPlan(0, (), (), np.zeros((0, 3), dtype=np.int32), (), _NONE, _NONE, _NONE, max_context=1)
"""A round in which nobody runs."""


def measure_round_costs(
    ranks: EngineRanks, limits: SchedulerLimits, clock: Callable[[], float] = time.perf_counter
) -> RoundCosts | None:
    """Run rounds of one row, four, sixteen and so on, each without a draft and with short and long ones.

    Args:
        ranks: all up, with no plan out and no row admitted.
        limits: of the batch, the context, and of what is drafted.
        clock: seconds.

    Returns:
        What they took, medians; None where contexts are too short to try.

    Raises:
        RankFailedError: a rank failed.
    """
    lens = sorted({0, 1, limits.draft_len // 2, limits.draft_len})
    contexts = min(context for context in (limits.max_seq_len, limits.draft_max_seq_len) if context is not None)
    length = min(_LENGTH, contexts - (1 + _NUM_TIMED) * (limits.draft_len + 1))
    if length < 2 or len(lens) < 2:
        return None
    rehearsal = _Rehearsal(ranks, limits, length, clock)
    seconds: dict[int, dict[int, float]] = {}
    started = clock()
    with ranks.stepping():
        for rows in _numbers_of_rows(limits.max_batch_size):
            if rows * (1 + limits.draft_len * limits.max_paths) > limits.max_num_tokens:
                break
            seconds[rows] = {draft_len: rehearsal.measure(rows, draft_len) for draft_len in lens}
            if clock() - started > _MOST_SECONDS:
                break
        rehearsal.drop_rows()
    return RoundCosts(seconds) if seconds else None


def _numbers_of_rows(most: int) -> Iterator[int]:
    rows = 1
    while rows < most:
        yield rows
        rows *= 4
    yield most


class _Rehearsal:
    """Plans for made-up rows, and the times of their verdicts."""

    def __init__(self, ranks: EngineRanks, limits: SchedulerLimits, length: int, clock: Callable[[], float]) -> None:
        self._ranks = ranks
        self._limits = limits
        self._length = length
        self._clock = clock
        self._last_index = _FIRST_ROUND
        self._num_admitted = 0

    def measure(self, rows: int, draft_len: int) -> float:
        """The median seconds of rounds of `rows` rows that draft `draft_len` tokens each."""
        total, published, times = 1 + _NUM_TIMED, deque[float](), list[float]()
        last, num_published = 0.0, 0
        while len(times) < total:
            while num_published < total and len(published) <= self._limits.plans_ahead:
                self._ranks.publish(self._plan(rows, draft_len, num_published))
                published.append(self._clock())
                num_published += 1
            self._await_verdict()
            received = self._clock()
            times.append(received - max(last, published.popleft()))
            last = received
        return statistics.median(times[1:])

    def drop_rows(self) -> None:
        """Leave the ranks as they were."""
        self._ranks.publish(replace(_NOTHING, round_index=self._index(), dropped_rows=tuple(range(self._num_admitted))))
        self._await_verdict()

    def _await_verdict(self) -> None:
        while not self._ranks.collect().is_verdict:
            pass  # the draft leader's, which tells its times

    def _index(self) -> int:
        self._last_index += 1
        return self._last_index

    def _plan(self, rows: int, draft_len: int, number: int) -> RoundPlan:
        """Round `number` of a kind; the first admits its rows anew."""
        follows = self._limits.draft_max_seq_len is not None
        plan = replace(
            _NOTHING,
            round_index=self._index(),
            decode_rows=np.arange(rows, dtype=np.int32),
            draft_lens=np.full(rows, draft_len, dtype=np.int32),
            catch_up=np.full(rows, 2 if follows and draft_len else 0, dtype=np.int32),
            max_context=self._length + (number + 1) * (draft_len + 1),
        )
        if number:
            return plan
        tokens = np.zeros(self._length, dtype=np.int32)
        dropped, self._num_admitted = tuple(range(self._num_admitted)), rows
        admissions = [RowAdmission(row, row, tokens, self._length, 0, follows, _SAMPLING) for row in range(rows)]
        return replace(plan, dropped_rows=dropped, admissions=tuple(admissions))
