"""Rounds whose prompts are cut into tiles: what fills these up counts, and every prompt comes to its end."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scheduler_simulation import make_request

from trtrun.core.nouns import RoundPlan
from trtrun.kvcache.tile_widths import padding
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler

TILE = 32


def run_rounds(
    lengths: list[int], tile: int | None, budget: int, rows: int = 16, draft_len: int = 5, max_tokens: int = 40
) -> list[RoundPlan]:
    """Rounds until all prompts of these lengths have `max_tokens` tokens; a row gains two a round."""
    limits = SchedulerLimits(rows, budget, 8000, None, draft_len, 16, 4000, plans_ahead=1, prompt_tile=tile)
    scheduler = Scheduler(limits)
    for number, length in enumerate(lengths):
        scheduler.add(make_request(number, [number % 100] * length, max_tokens))
    plans: list[RoundPlan] = []
    out: list[RoundPlan] = []
    while scheduler.has_work:
        plan = scheduler.schedule() if len(out) < 2 else None
        if plan is not None:
            plans.append(plan)
            out.append(plan)
            continue
        due = out.pop(0)
        decoded = len(due.decode_rows)
        gains = [2 if index < decoded and due.draft_lens[index] > 0 else 1 for index in range(len(due.sampled_rows))]
        scheduler.commit(due, gains, [[5] * gain for gain in gains])
        assert len(plans) < 5000, "it never ends"
    return plans


def num_decoded(plan: RoundPlan) -> int:
    return sum(int(draft_len) + 1 for draft_len in plan.draft_lens)


def num_computed(plan: RoundPlan) -> int:
    """Rows of activations of the target."""
    return num_decoded(plan) + sum(chunk.length + padding(chunk.length, TILE) for chunk in plan.prefill)


@pytest.mark.parametrize("seed", range(5))
def test_no_more_rows_are_computed_than_a_round_has_tokens(seed: int) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 3000) for _ in range(40)]
    plans = run_rounds(lengths, TILE, 2048)
    most = max(map(num_computed, plans))
    assert most <= 2048 + padding(TILE // 2 + 1, TILE), "but for the end of the last prompt of a round"
    assert sum(num_computed(plan) > 2048 for plan in plans) <= len(plans) // 10
    whole = [chunk.length % TILE for plan in plans for chunk in plan.prefill if not chunk.is_last]
    assert whole
    assert not any(whole), "a chunk that does not end its prompt is whole tiles"
    assert sum(chunk.length for plan in plans for chunk in plan.prefill) == sum(lengths)
    assert len(plans) <= 1.05 * len(run_rounds(lengths, None, 2048))


def test_prompts_of_one_length_behind_each_other_leave_nothing_behind_a_full_round() -> None:
    """Eight of 2,000 tokens: without tiles most rounds have some rows more than 2,048."""
    lengths = [2000] * 8
    assert sum(num_computed(plan) > 2048 for plan in run_rounds(lengths, None, 2048)) > 3
    plans = run_rounds(lengths, TILE, 2048)
    assert max(map(num_computed, plans)) <= 2048
    assert sum(bool(plan.prefill) for plan in plans) == 8


@pytest.mark.parametrize("budget", [1, 7, 26, 40, 70])
def test_prompts_are_read_where_rounds_have_less_left_than_a_tile(budget: int) -> None:
    lengths = [3, 300, 40, 100, 9, 61]
    plans = run_rounds(lengths, TILE, budget, rows=4, draft_len=2, max_tokens=30)
    ended = Counter(chunk.is_last for plan in plans for chunk in plan.prefill)
    assert ended[True] == len(lengths)
    for plan in plans:
        assert num_decoded(plan) + sum(chunk.length for chunk in plan.prefill) <= budget


def test_a_long_prompt_is_read_on_beside_short_ones_that_keep_coming() -> None:
    """They leave less than a tile of a round to it."""
    limits = SchedulerLimits(8, 40, 8000, None, 0, 16, 4000, prompt_tile=TILE)
    scheduler = Scheduler(limits)
    scheduler.add(make_request(0, [1] * 1000, 1))
    read = 0
    for number in range(1, 101):
        plan = commit_next(scheduler)
        if number == 1:
            (admission,) = plan.admissions
        read += sum(chunk.length for chunk in plan.prefill if chunk.row == admission.row)
        if read == 1000:
            return
        scheduler.add(make_request(number, [number] * 10, 1))
    raise AssertionError(f"{read} of 1000 tokens after 100 rounds")


def read_beside(*others: int, decodes: bool = False) -> list[int]:
    """Tokens that the first rounds read of a prompt of 1,000, beside prompts of so many that wait with it, and a row
    that decodes; of 64 a round, or of 640 where it is alone."""
    limits = SchedulerLimits(8, 640, 8000, None, 0, 16, 4000, prompt_tile=TILE, max_shared_tokens=64)
    scheduler, found = Scheduler(limits), list[int]()
    if decodes:
        scheduler.add(make_request(0, [7] * 10, 3))
        commit_next(scheduler)
    for number, length in enumerate((1000, *others), 1):
        scheduler.add(make_request(number, [number] * length, 1))
    while scheduler.has_work:
        plan = commit_next(scheduler)
        found.append(sum(chunk.length for chunk in plan.prefill))
    return found


def commit_next(scheduler: Scheduler) -> RoundPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [1] * len(plan.sampled_rows), [[5]] * len(plan.sampled_rows))
    return plan


def test_more_of_a_prompt_is_read_at_once_where_nobody_waits() -> None:
    assert read_beside() == [640, 360]
    assert read_beside(decodes=True) == [TILE, TILE, 640, 1000 - 640 - 2 * TILE]
    assert read_beside(1000) == [640, 360, 640, 360]
    assert read_beside(10) == [64, 10 + TILE, 640, 1000 - 640 - 64 - TILE]


def test_a_prompt_is_read_on_beside_a_shorter_one_that_came_later() -> None:
    """Which has not the whole round, though nobody waits any more."""
    scheduler = Scheduler(SchedulerLimits(8, 640, 8000, None, 0, 16, 4000, prompt_tile=TILE, max_shared_tokens=64))
    scheduler.add(make_request(0, [1] * 3000, 1))
    assert [chunk.length for chunk in commit_next(scheduler).prefill] == [640]
    scheduler.add(make_request(1, [2] * 500, 1))
    assert all([chunk.length for chunk in commit_next(scheduler).prefill] == [TILE, TILE] for _ in range(500 // TILE))
    assert [chunk.length for chunk in commit_next(scheduler).prefill] == [500 % TILE, TILE]
    assert [chunk.length for chunk in commit_next(scheduler).prefill] == [640]
