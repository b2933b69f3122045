"""Rounds before the first request whose drafts are made ahead of verdicts and behind them: what both take on this
machine, so that no text has to be the one on which it is found out.

It knows which rounds are compared. It does not know how they are run (warm_up_rounds.py), or what follows from their
times (speculation/ahead/policy.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.speculation.ahead.ahead_costs import AheadCosts, AheadRound, costs_of
from trtrun.speculation.ahead.policy import FIRST_GUESSES_PER_ROW, enough_guesses
from trtrun.speculation.round_costs import RoundCosts
from trtrun.start.warm_up_rounds import NUM_TIMED, WarmUpRounds, measured_lens, measured_rows, row_length

_MOST_SECONDS = 1.0
"""That they take: no kind of round is begun that would not be done by then."""

_LEAST = 2
"""Rounds of a kind: the first does not count."""


def measure_ahead_costs(
    ranks: EngineRanks,
    limits: SchedulerLimits,
    steps: Sequence[int],
    assumed: RoundCosts,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, AheadCosts]:
    """Run rounds of one row, of the most, and of numbers between, whose drafts are made behind the verdict and ahead of
    it, as far as there is time. Few of the first kind are run until both ways of it are known, as rounds may be slow.

    Args:
        ranks: all up, with no plan out and no row admitted.
        limits: of the batch, the context, and of what is drafted.
        steps: numbers of guesses that rounds may have.
        assumed: tells how long rounds of a number of rows may take from how long those of another took.
        clock: seconds.

    Returns:
        What they took, by number of rows; nothing where contexts are too short to try, or rounds take too long.

    Raises:
        RankFailedError: a rank failed.
    """
    kinds = _ahead_kinds(limits, steps)
    if not kinds:
        return {}
    rounds = WarmUpRounds(ranks, limits, row_length(limits, 1 + NUM_TIMED), clock)
    measured: dict[int, list[AheadRound]] = {}
    ends, scale = clock() + _MOST_SECONDS, 0.0
    with ranks.stepping():
        for rows, num_guesses in (*kinds[:2], kinds[0], *kinds[2:]):
            usual = assumed.estimate(rows, limits.draft_len)
            count = min(1 + NUM_TIMED, int((ends - clock()) / (scale * usual))) if scale else _LEAST
            if count < _LEAST:
                continue
            took = rounds.measure_ahead(rows, num_guesses, count)
            measured.setdefault(rows, []).extend(took)
            scale = max(scale, statistics.median_low(one.seconds for one in took) / usual)
        rounds.drop_rows()
    found = {rows: costs_of(of_rows) for rows, of_rows in sorted(measured.items())}
    return {rows: costs for rows, costs in found.items() if costs is not None}


def _ahead_kinds(limits: SchedulerLimits, steps: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of rows, and of guesses: both ways for all numbers of rows before other numbers of guesses."""
    if not steps or not measured_lens(limits):
        return []
    kinds = []
    for rows in measured_rows(limits):
        counts = sorted(enough_guesses(steps, rows), key=lambda step: abs(step - rows * FIRST_GUESSES_PER_ROW))
        kinds += [(place > 1, rows, num_guesses) for place, num_guesses in enumerate((0, *counts))]
    return [(rows, num_guesses) for _, rows, num_guesses in sorted(kinds, key=lambda kind: kind[0])]


def count_ahead_rounds(limits: SchedulerLimits, steps: Sequence[int]) -> int:
    """Rounds that `measure_ahead_costs` runs, but for the one that drops rows: at most, as `count_measured_rounds`."""
    kinds = len(_ahead_kinds(limits, steps))
    return _LEAST + kinds * (1 + NUM_TIMED) if kinds else 0
