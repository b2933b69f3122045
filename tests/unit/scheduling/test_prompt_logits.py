"""Which positions of prompts report their logits, in which round, and whose the logits of a round are."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_rounds import LIMITS, commit, schedule, with_limits
from scheduler_simulation import make_request

from trtrun.core.nouns import LogitsPart, Request, RoundPlan
from trtrun.core.outputs import Logits
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.batch import ScoredRow
from trtrun.scheduling.completions import NO_PLACE, PromptLogits
from trtrun.scheduling.results import commit_logits
from trtrun.scheduling.scheduler import Scheduler

ASKED = SamplingParams(return_context_logits=True, prompt_logprobs=1, seed=0)


def logits(count: int, first: int = 0) -> np.ndarray:
    """[count, 3] float32, all different."""
    return np.arange(3 * first, 3 * (first + count), dtype=np.float32).reshape(count, 3)


def test_each_position_is_reported_once_and_told_once() -> None:
    kept = PromptLogits(10)
    assert kept.part_of(0, 4) == LogitsPart(0, 4) and kept.take_new() is None
    kept.take(logits(4))
    assert kept.part_of(0, 4) is None and kept.part_of(2, 4) == LogitsPart(4, 2)
    assert kept.part_of(4, 9) == LogitsPart(4, 6), "behind the last token, too, and not behind what follows the prompt"
    kept.take(logits(2, 4))
    assert not kept.is_whole
    told = kept.take_new()
    assert told is not None and np.array_equal(told.array(), logits(6)) and told.num_positions == 6
    kept.take(logits(4, 6))
    assert kept.is_whole and kept.part_of(0, 20) is None
    told = kept.take_new()
    assert told is not None and np.array_equal(told.array(), logits(4, 6)) and kept.take_new() is None


def test_what_is_behind_some_positions() -> None:
    found = Logits(3, (logits(2).tobytes(), logits(2, 2).tobytes()))
    left = found.behind(3)
    assert left is not None and np.array_equal(left.array(), logits(1, 3)) and found.behind(4) is None


def test_logits_of_a_row_that_was_preempted_meanwhile_are_nobodys() -> None:
    scheduler = Scheduler(LIMITS)
    first, second = (scheduler.add(Request(number, (1, 2, 3, 4), ASKED)) for number in range(2))
    reported = [ScoredRow(first, first.epoch + 1, 2), ScoredRow(second, second.epoch, 1)]
    assert commit_logits(reported, logits(3)) == [second]
    assert first.logits is not None and second.logits is not None
    assert (first.logits.num_reported, second.logits.num_reported) == (0, 1)
    told = second.logits.take_new()
    assert told is not None and np.array_equal(told.array(), logits(1, 2)), "behind those of the other row"


def chunks(plan: RoundPlan) -> dict[int, tuple[int, int, LogitsPart | None]]:
    """By row: where its chunk begins, how long it is, and what is reported."""
    return {chunk.row: (chunk.start, chunk.length, chunk.reported) for chunk in plan.prefill}


@pytest.mark.parametrize("tile", [None, 4])
def test_a_round_reports_few_positions_and_reads_other_prompts_as_ever(tile: int | None) -> None:
    scheduler = Scheduler(with_limits(most_reported=8, prompt_tile=tile))
    for number in range(2):
        scheduler.add(Request(number, (1,) * 18, ASKED))
    scheduler.add(make_request(2, [2] * 20, 5))
    first = schedule(scheduler)
    assert chunks(first) == {0: (0, 8, LogitsPart(0, 8)), 1: (0, 20, None)}, "the second of them is not let in"
    results = scheduler.commit(first, [1], [[5]], prompt_logits=logits(8))
    assert [result.index_in_verdict for result in results] == [0, NO_PLACE]
    assert results[1].completion.logits is not None and results[1].completion.logits.num_reported == 8
    parts: list[tuple[int, int]] = []
    for _ in range(5):
        plan = schedule(scheduler)
        reported = [chunk.reported for chunk in plan.prefill if chunk.reported is not None]
        parts += [(part.start, part.length) for part in reported]
        count = sum(part.length for part in reported)
        assert count <= 8
        rows = plan.sampled_rows
        scheduler.commit(plan, [1] * len(rows), [[5]] * len(rows), prompt_logits=logits(count))
    assert parts == [(8, 8), (16, 2), (0, 8), (8, 8), (16, 2)]


def test_a_prompt_that_is_reported_keeps_no_tokens_of_the_round_that_it_may_not_read() -> None:
    scheduler = Scheduler(with_limits(max_num_tokens=20, most_reported=4))
    scheduler.add(Request(0, (1,) * 30, ASKED))
    scheduler.add(make_request(1, [2] * 30, 5))
    plan = schedule(scheduler)
    assert chunks(plan) == {0: (0, 4, LogitsPart(0, 4)), 1: (0, 16, None)}
    scheduler.commit(plan, [], [], prompt_logits=logits(4))
    assert chunks(schedule(scheduler)) == {0: (4, 4, LogitsPart(4, 4)), 1: (16, 14, None)}


@pytest.mark.parametrize(("most_reported", "drafted"), [(None, 3), (8, 3), (6, 2), (2, 0), (1, 0)])
def test_few_are_drafted_for_many_rows_whose_logits_are_reported(most_reported: int | None, drafted: int) -> None:
    scheduler = Scheduler(with_limits(most_reported=most_reported))
    reporting = SamplingParams(return_generation_logits=True, max_tokens=30, seed=0)
    requests = [Request(0, (1,) * 4, reporting), make_request(1, [2] * 4, 30), Request(2, (3,) * 4, reporting)]
    for request in requests:
        scheduler.add(request)
    commit(scheduler, schedule(scheduler), *[[5]] * 3)
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [drafted, 3, drafted]
    commit(scheduler, plan, *[[5]] * 3)
    scheduler.cancel(2)
    if most_reported == 6:
        assert schedule(scheduler).draft_lens.tolist() == [3, 3], "of one row more"


def test_the_oldest_prompt_that_is_reported_comes_to_its_end_whatever_shorter_ones_come() -> None:
    scheduler = Scheduler(with_limits(most_reported=4))
    scheduler.add(Request(0, (1,) * 20, ASKED))
    for number in range(5):
        plan = schedule(scheduler)
        assert chunks(plan)[0] == (4 * number, 4, LogitsPart(4 * number, 4))
        scheduler.add(Request(number + 1, (2,) * 3, ASKED))
        rows = plan.sampled_rows
        scheduler.commit(plan, [1] * len(rows), [[5]] * len(rows), prompt_logits=logits(4))
    assert chunks(schedule(scheduler)) == {1: (0, 3, LogitsPart(0, 3)), 2: (0, 1, LogitsPart(0, 1))}


def test_a_prompt_alone_gets_on_whatever_the_limit() -> None:
    scheduler = Scheduler(with_limits(most_reported=1, prompt_tile=4))
    scheduler.add(Request(0, (1,) * 6, ASKED))
    plan = schedule(scheduler)
    assert chunks(plan) == {0: (0, 4, LogitsPart(0, 4))}, "a whole tile"
    scheduler.commit(plan, [], [], prompt_logits=logits(4))
    plan = schedule(scheduler)
    assert chunks(plan) == {0: (4, 2, LogitsPart(4, 2))}
    (result,) = scheduler.commit(plan, [1], [[5]], prompt_logits=logits(2))
    assert result.new_token_ids == [5]
    assert commit(scheduler, schedule(scheduler), [5])
