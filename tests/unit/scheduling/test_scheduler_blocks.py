"""Plans ahead of results, rows that lose their blocks to others, and who is let in where blocks are short."""

from __future__ import annotations

import pytest
from scheduler_rounds import commit, schedule, start, with_limits
from scheduler_simulation import make_request, output_of

from trtrun.scheduling.scheduler import Scheduler


def test_plan_ahead_reserves_for_the_upper_bound() -> None:
    scheduler = Scheduler(with_limits(plans_ahead=1, block_size=1))
    start(scheduler, 5)
    first = schedule(scheduler)  # 6 tokens: positions 5 to 8
    assert [index for _, index, _ in first.block_updates.tolist()] == [5, 6, 7, 8] and first.max_context == 10
    second = schedule(scheduler)  # 10 tokens at most: positions up to 12
    assert [index for _, index, _ in second.block_updates.tolist()] == [9, 10, 11, 12] and second.max_context == 14
    with pytest.raises(RuntimeError, match="2 results are due but plans_ahead is 1"):
        scheduler.schedule()
    commit(scheduler, first, [6])
    third = schedule(scheduler)  # 7 tokens known, 11 at most
    assert [index for _, index, _ in third.block_updates.tolist()] == [13] and third.max_context == 15


def test_plan_ahead_waits_where_the_row_is_sure_or_likely_to_end() -> None:
    scheduler = Scheduler(with_limits(plans_ahead=1))
    start(scheduler, 5, max_tokens=2)
    plan = schedule(scheduler)
    assert scheduler.schedule() is None, "the outstanding round gives the last token"
    assert commit(scheduler, plan, [6])[0].completion.finish_reason is not None
    scheduler = Scheduler(with_limits(plans_ahead=1, max_seq_len=9))
    start(scheduler, 5)
    plan = schedule(scheduler)
    assert scheduler.schedule() is None, "it may stand at the context's end"
    assert commit(scheduler, plan, [6])[0].completion.finish_reason is None
    assert schedule(scheduler).draft_lens.tolist() == [1]


def test_last_chunk_and_first_round_may_both_be_out() -> None:
    scheduler = Scheduler(with_limits(plans_ahead=1))
    scheduler.add(make_request(0, [1] * 5))
    prefill, decode = schedule(scheduler), schedule(scheduler)
    assert prefill.sampled_rows == decode.sampled_rows == [0] and decode.draft_lens.tolist() == [3]
    commit(scheduler, prefill, [5])
    assert output_of(commit(scheduler, decode, [6, 7])[0].completion) == [5, 6, 7]


def test_results_of_a_row_that_ended_are_ignored() -> None:
    scheduler = Scheduler(with_limits(plans_ahead=1))
    running = scheduler.add(make_request(0, [1] * 5, 30, stop_ids=(7,)))
    commit(scheduler, schedule(scheduler), [5])
    first, second = schedule(scheduler), schedule(scheduler)
    commit(scheduler, first, [7])
    scheduler.add(make_request(1, [1]))
    third = schedule(scheduler)
    assert third.dropped_rows == (0,) and third.admissions[0].row == 0
    assert commit(scheduler, second, [8]) == [], "the row is another request's now"
    assert output_of(running) == [5, 7]
    assert commit(scheduler, third, [5])[0].completion.request.request_id == 1


def test_preemption_takes_the_newest_row_and_puts_it_first_in_the_queue() -> None:
    # 7 blocks of 4: 3 rows of 2 blocks each (and 1 for growth of two); 8 positions are full at length 8.
    scheduler = Scheduler(with_limits(num_blocks=8, max_batch_size=3, enable_block_reuse=False, draft_len=0))
    for number in range(4):
        scheduler.add(make_request(number, [number] * 5, 30))
    plan = schedule(scheduler)
    assert [a.request_id for a in plan.admissions] == [0, 1], "the third would take the blocks that they grow into"
    commit(scheduler, plan, [5], [5])
    for _ in range(2):
        commit(scheduler, schedule(scheduler), [6], [6])
    assert scheduler.num_running == 2 and scheduler.num_free_blocks == 3
    states = [scheduler._requests[number] for number in range(4)]
    while states[1].statistics.num_preemptions == 0:
        before = list(states[1].token_ids)
        plan = schedule(scheduler)
        commit(scheduler, plan, *[[6]] * len(plan.sampled_rows))
    assert states[0].statistics.num_preemptions == 0 and states[0].row == 0
    assert plan.dropped_rows == (1,) and plan.decode_rows.tolist() == [0] and plan.admissions == ()
    assert next(scheduler._waiting.in_turn()) is states[1] and scheduler.num_waiting == 3
    assert scheduler.num_preempted == 1
    first_admitted = states[1].statistics.admitted
    assert first_admitted is not None and first_admitted >= states[1].statistics.arrival
    assert states[3].statistics.admitted is None and states[3].statistics.queue_seconds == 0
    while states[0].finish_reason is None:
        plan = schedule(scheduler)
        assert not plan.admissions, "nobody overtakes the preempted request"
        commit(scheduler, plan, *[[6]] * len(plan.sampled_rows))
    again = schedule(scheduler).admissions[0]
    assert again.request_id == 1 and again.tokens.tolist() == before and again.num_prompt_tokens == 5
    assert states[1].token_ids == before, "committed output stays"
    assert states[1].statistics.admitted == first_admitted and scheduler.num_preempted == 0


def test_results_of_a_preempted_row_are_ignored() -> None:
    # 4 blocks of 4: the first row needs its third block while the second, two tokens behind, still has room in its
    # own two. The first waits for its own result, the second is planned once more, and then has to go.
    scheduler = Scheduler(with_limits(num_blocks=5, max_batch_size=2, plans_ahead=1, draft_len=0))
    for number, length in enumerate([4, 2]):
        scheduler.add(make_request(number, [number] * length, 30))
    plan = schedule(scheduler)
    second = scheduler._requests[1]
    lost = 0
    while second.statistics.num_preemptions == 0:
        following = scheduler.schedule()
        length = len(second.token_ids)
        sampled = plan.sampled_rows
        results = commit(scheduler, plan, *[[6]] * len(sampled))
        if second.statistics.num_preemptions:
            lost = len(sampled) - len(results)
            assert len(second.token_ids) == length
        plan = following if following is not None else schedule(scheduler)
    assert lost == 1


@pytest.mark.parametrize(("num_blocks", "admitted"), [(17, 1), (16, 0)])
def test_admission_leaves_the_running_rows_room_to_grow(num_blocks: int, admitted: int) -> None:
    # The first row holds 8 blocks of 1 and may grow by 4 a round; the second needs 4.
    scheduler = Scheduler(with_limits(block_size=1, num_blocks=num_blocks))
    start(scheduler, 4)
    scheduler.add(make_request(1, [2] * 4, 30))
    assert len(schedule(scheduler).admissions) == admitted


def test_nobody_is_preempted_for_an_upper_bound() -> None:
    # 16 blocks of 1: both rows hold 8. At most 9 tokens long they need more, but the outstanding result may be short.
    scheduler = Scheduler(with_limits(block_size=1, num_blocks=17, plans_ahead=1))
    start(scheduler, 4, 4)
    plan = schedule(scheduler)
    assert scheduler.num_free_blocks == 0 and scheduler.schedule() is None
    commit(scheduler, plan, [6], [6])
    assert schedule(scheduler).draft_lens.tolist() == [2, 2], "drafts shrink to the blocks that are there"
    assert scheduler.num_running == 2 and scheduler.num_waiting == 0
