"""A scheduler by hand: small limits, one plan, its result."""

from __future__ import annotations

import dataclasses

from scheduler_simulation import make_request

from trtrun.core.nouns import RoundPlan
from trtrun.scheduling.completions import RowResult
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler

LIMITS = SchedulerLimits(
    max_batch_size=4, max_num_tokens=64, max_seq_len=64, draft_max_seq_len=64, draft_len=3, block_size=4, num_blocks=65
)


def with_limits(**changes: int | bool | tuple[int, ...] | None) -> SchedulerLimits:
    return dataclasses.replace(LIMITS, **changes)  # type: ignore[arg-type]


def schedule(scheduler: Scheduler) -> RoundPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: RoundPlan, *tokens: list[int]) -> list[RowResult]:
    return scheduler.commit(plan, [len(row) for row in tokens], list(tokens))


def start(scheduler: Scheduler, *lengths: int, max_tokens: int = 30) -> None:
    """Add prompts of these lengths, which fit into one round, and commit 5 as each one's first token."""
    for number, length in enumerate(lengths):
        scheduler.add(make_request(number, [1] * length, max_tokens))
    commit(scheduler, schedule(scheduler), *[[5]] * len(lengths))
