"""What each plan holds and what each commit does, one rule a test; whole runs are in test_scheduler_simulation.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_rounds import LIMITS, commit, schedule, start, with_limits
from scheduler_simulation import Job, make_request, output_of

from trtrun.core.guide import Guide, GuideStart
from trtrun.core.nouns import WAITS, WAITS_ALONE, FinishReason, Request, RoundPlan
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import ThoughtBounds, TokenLists, TokenSequences
from trtrun.errors import ConfigError, InvalidRequestError
from trtrun.scheduling import admission
from trtrun.scheduling.results import append_tokens
from trtrun.scheduling.scheduler import Scheduler
from trtrun.tokens.detokenizer import AhoCorasick


def test_first_plan_admits_in_order_into_the_smallest_rows() -> None:
    scheduler = Scheduler(LIMITS)
    for number, length in enumerate([5, 3, 1, 2, 6]):
        scheduler.add(make_request(number, [1] * length, stop_ids=(5,) if number in (1, 2) else ()))
    plan = schedule(scheduler)
    assert [(a.row, a.request_id) for a in plan.admissions] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(c.row, c.start, c.length, c.is_last) for c in plan.prefill] == [
        (0, 0, 5, True), (1, 0, 3, True), (2, 0, 1, True), (3, 0, 2, True)
    ]  # fmt: skip
    assert plan.sampled_rows == [0, 1, 2, 3] and plan.decode_rows.size == 0
    assert plan.admissions[0].tokens.tolist() == [1] * 5 and plan.max_context == 6
    assert [update[:2] for update in plan.block_updates.tolist()] == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0]]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)
    # Rows 1 and 2 end; the waiting request gets row 1, in the plan that drops it.
    scheduler.commit(plan, [1] * 4, [[5]] * 4)
    plan = schedule(scheduler)
    assert plan.dropped_rows == (1, 2) and plan.admissions[0].row == 1
    assert plan.decode_rows.tolist() == [0, 3] and plan.sampled_rows == [0, 3, 1]


def test_decode_rows_come_before_prefill_and_prefill_takes_what_is_left() -> None:
    scheduler = Scheduler(with_limits(max_num_tokens=10))
    start(scheduler, 3, 3)
    long, late = make_request(2, [1] * 7), make_request(3, [1])
    scheduler.add(long)
    scheduler.add(late)
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [3, 3]
    assert [(c.row, c.start, c.length, c.is_last) for c in plan.prefill] == [(2, 0, 2, False)]
    assert scheduler.num_prefill_tokens == 7 and scheduler.num_decoding == 2
    assert plan.sampled_rows == [0, 1]
    commit(scheduler, plan, [6], [6])
    plan = schedule(scheduler)
    # Half of it for the oldest, the rest for the shortest.
    assert [(c.row, c.start, c.length, c.is_last) for c in plan.prefill] == [(3, 0, 1, True), (2, 2, 1, False)]
    assert plan.sampled_rows == [0, 1, 3]
    commit(scheduler, plan, [6], [6], [6])
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [3, 2, 0], "and drafts leave a prompt that is being read its share"
    assert [(c.row, c.start, c.length, c.is_last) for c in plan.prefill] == [(2, 3, 2, False)]


def test_tight_budget_cuts_drafts_before_it_cuts_rows() -> None:
    scheduler = Scheduler(with_limits(max_num_tokens=5))
    start(scheduler, 1, 1, 1)
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [2, 0, 0]
    scheduler = Scheduler(with_limits(max_num_tokens=2))
    start(scheduler, 1, 1)
    assert schedule(scheduler).draft_lens.tolist() == [0, 0]


def test_a_tree_counts_by_its_tokens_and_is_cut_where_a_round_has_no_room() -> None:
    limits = with_limits(draft_nodes=(0, 10, 38, 61))
    assert [limits.longest_draft(3, left) for left in (-4, 9, 10, 60, 61, 99)] == [0, 0, 1, 2, 3, 3]
    assert limits.longest_draft(2, 99) == 2 and [limits.num_verified(length) for length in (0, 3)] == [1, 62]
    assert [with_limits().longest_draft(3, left) for left in (-1, 2, 9)] == [0, 2, 3]
    scheduler = Scheduler(limits)
    start(scheduler, 4, 4)
    plan = schedule(scheduler)
    # 64 tokens: 62 of the first row, and one of the second, whose draft has no room.
    assert plan.draft_lens.tolist() == [3, 0]
    scheduler = Scheduler(with_limits(draft_nodes=(0, 10, 38, 61), max_num_tokens=51))
    start(scheduler, 4, 4)
    assert schedule(scheduler).draft_lens.tolist() == [2, 1]
    with pytest.raises(ConfigError, match="draft_nodes must be of each number up to draft_len"):
        with_limits(draft_nodes=(0, 10))


def test_draft_len_stops_before_max_tokens_and_the_contexts_end() -> None:
    scheduler = Scheduler(LIMITS)
    start(scheduler, 5, max_tokens=4)
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [2], "three are left, one of which is the target's own"
    commit(scheduler, plan, [6, 6])
    assert schedule(scheduler).draft_lens.tolist() == [0]
    scheduler = Scheduler(with_limits(max_seq_len=9))
    start(scheduler, 5)
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [2] and plan.max_context == 9


def test_length_ends_a_request_at_max_tokens_the_context_and_the_whole_store() -> None:
    for limits, max_tokens, expected in (
        (LIMITS, 6, 6), (with_limits(max_seq_len=12), 100, 8), (with_limits(num_blocks=4), 100, 8)
    ):  # fmt: skip
        job = Job(limits)
        running = job.add(make_request(0, [1, 2, 3, 4], max_tokens))
        job.run([])
        assert len(output_of(running)) == expected and running.finish_reason is FinishReason.LENGTH


def test_stop_discards_the_rest_of_the_round() -> None:
    scheduler = Scheduler(LIMITS)
    running = scheduler.add(make_request(0, [1, 2], 30, stop_ids=(7,)))
    commit(scheduler, schedule(scheduler), [5])
    results = commit(scheduler, schedule(scheduler), [6, 7, 8])
    assert [(r.completion, r.new_token_ids, r.index_in_verdict) for r in results] == [(running, [6, 7], 0)]
    assert output_of(running) == [5, 6, 7] and running.finish_reason is FinishReason.STOP
    assert running.row == -1 and not scheduler.has_work and scheduler.idle_is_whole()
    assert scheduler.schedule() is None, "at idle the ranks are not told of dropped rows"
    scheduler.add(make_request(1, [1]))
    assert schedule(scheduler).dropped_rows == (0,)


def test_stop_token_at_the_last_allowed_place_is_a_stop() -> None:
    scheduler = Scheduler(LIMITS)
    running = scheduler.add(make_request(0, [1, 2], 1, stop_ids=(7,)))
    commit(scheduler, schedule(scheduler), [7])
    assert running.finish_reason is FinishReason.STOP


class CountedTokens(list[int]):
    """Tokens that count how often one is looked for among them."""

    num_searches = 0

    def __contains__(self, token: object) -> bool:
        self.num_searches += 1
        return super().__contains__(token)


def test_many_stop_tokens_are_not_gone_through_in_each_round() -> None:
    scheduler = Scheduler(LIMITS)
    running = scheduler.add(make_request(0, [1, 2], 30, stop_ids=tuple(range(100, 5000))))
    tokens = CountedTokens([5, 6, 7])
    assert append_tokens(running, tokens, LIMITS) == ([5, 6, 7], None) and tokens.num_searches == 0
    assert append_tokens(running, [8, 4999, 9], LIMITS) == ([8, 4999], FinishReason.STOP)


class CountedToken(int):
    """Tokens that count how often one is looked up."""

    num_hashed = 0

    def __hash__(self) -> int:
        CountedToken.num_hashed += 1
        return super().__hash__()


def test_a_token_costs_as_much_with_stop_sequences_of_many_lengths() -> None:
    """As many lengths as the limit of all tokens allows."""
    sequences = (*((1,) * length + (2,) for length in range(361)), *((place, place + 1, 7) for place in range(3, 600)))
    limits = with_limits(max_seq_len=4096, num_blocks=2048)
    scheduler, stops = Scheduler(limits), AhoCorasick(sequences)
    sampling = SamplingParams(seed=1, max_tokens=4000)
    for number in range(2):  # completions of a request share what finds them
        running = scheduler.add(Request(number, (1,), sampling), stops=stops)
        CountedToken.num_hashed = 0
        tokens = [CountedToken(1 if place % 400 else 9) for place in range(1, 2000)]
        assert append_tokens(running, tokens, limits) == (tokens, None)
        assert append_tokens(running, [500, 501, 7, 8], limits) == ([500, 501, 7], FinishReason.STOP)
        assert CountedToken.num_hashed < 8 * len(tokens)


def test_a_stop_sequence_counts_over_rounds_and_not_from_the_prompt() -> None:
    sampling = SamplingParams(seed=1, max_tokens=20, min_tokens=20, stop_sequences=[[5, 6]])
    running = Scheduler(LIMITS).add(Request(0, (1, 5), sampling), stops=AhoCorasick(sampling.stop_sequences))
    assert append_tokens(running, [6, 5], LIMITS) == ([6, 5], None)
    assert append_tokens(running, [6, 7], LIMITS) == ([6], FinishReason.STOP)


def test_a_given_draft_ends_where_the_text_has_to() -> None:
    """It travels and is compared with each row of its request."""
    for max_tokens, expected in ((8, 8), (10**6, LIMITS.max_length - 3)):
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, draft_token_ids=(4,) * 5000)
        completion = Scheduler(LIMITS).add(Request(0, (1, 2, 3), sampling))
        assert len(completion.predicted_output) == expected


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_rows_whose_length_may_change_a_token_are_told(plans_ahead: int) -> None:
    """Of three tokens at least, and of thoughts that a mark of two ends behind ten; each round may give four."""
    thoughts = ThoughtBounds(10, TokenSequences.of([]), TokenSequences.of([[8, 9]]))
    told: list[list[int]] = []
    for sampling, lists in (
        (SamplingParams(seed=1, max_tokens=40, min_tokens=3), TokenLists.of([7])),
        (SamplingParams(seed=1, max_tokens=40), TokenLists.of(thoughts=thoughts)),
        (SamplingParams(seed=1, max_tokens=40), TokenLists.of(bad_words=[[4]])),
    ):
        scheduler, plans = Scheduler(with_limits(max_seq_len=128, plans_ahead=plans_ahead)), list[RoundPlan]()
        running, told_of = scheduler.add(Request(0, (1, 1), sampling, lists=lists)), list[int]()
        while running.num_output_tokens < 20:
            while len(plans) <= plans_ahead and (plan := scheduler.schedule()) is not None:
                plans.append(plan)
                told_of += [running.num_output_tokens] if plan.timed_rows else []
                assert plan.timed_rows in ((), (0,))
            commit(scheduler, plans.pop(0), [6] if running.num_output_tokens == 0 else [6, 6])
        told.append(told_of)
    # With a plan ahead, rounds may have given four tokens more than is known.
    if plans_ahead:
        assert told == [[0, 0, 1], [3, 5, 7, 9, 11], []]
    else:
        assert told == [[0, 1], [7, 9, 11], []]


def test_statistics_count_speculative_rounds() -> None:
    scheduler = Scheduler(LIMITS)
    running = scheduler.add(make_request(0, [1, 2], 30))
    commit(scheduler, schedule(scheduler), [5])
    assert running.statistics.num_rounds == 0 and running.statistics.first_token is not None
    commit(scheduler, schedule(scheduler), [6, 6, 6])
    commit(scheduler, schedule(scheduler), [6])
    statistics = running.statistics
    assert (statistics.num_rounds, statistics.num_draft_tokens, statistics.num_accepted_draft_tokens) == (2, 6, 2)
    assert statistics.acceptance_histogram == [1, 0, 1] and statistics.mean_acceptance_length == 2.0
    assert statistics.arrival <= statistics.first_token and statistics.finished is None


def test_draft_shrinks_at_its_context_and_then_leaves_the_row_for_good() -> None:
    scheduler = Scheduler(with_limits(draft_max_seq_len=10))
    start(scheduler, 6)  # 7 tokens
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [3]
    commit(scheduler, plan, [6])
    plan = schedule(scheduler)
    assert plan.draft_lens.tolist() == [2], "8 tokens and 2 drafts fill its context of 10"
    commit(scheduler, plan, [6, 6, 6])
    for _ in range(3):
        plan = schedule(scheduler)
        assert plan.draft_lens.tolist() == [-1] and plan.draft_len == 0
        commit(scheduler, plan, [6])


@pytest.mark.parametrize(("length", "drafted"), [(8, True), (9, False)])
def test_prompt_beyond_the_draft_context_runs_without_drafts(length: int, drafted: bool) -> None:
    scheduler = Scheduler(with_limits(draft_max_seq_len=10))
    running = scheduler.add(make_request(0, [1] * length))
    plan = schedule(scheduler)
    assert plan.admissions[0].has_draft_kv == plan.prefill[0].has_draft_kv == drafted
    commit(scheduler, plan, [5])
    assert schedule(scheduler).draft_lens.tolist() == [1 if drafted else -1]
    assert running.statistics.num_rounds == 0


def test_speculation_off_never_touches_the_draft() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.set_speculation(False)
    start(scheduler, 3)
    assert schedule(scheduler).draft_lens.tolist() == [-1]
    with pytest.raises(RuntimeError, match="idle only: 1 running, 0 waiting, 1 results due"):
        scheduler.set_speculation(True)
    scheduler.cancel(0)
    with pytest.raises(RuntimeError, match="1 results due"):
        scheduler.set_speculation(True)
    none = Scheduler(with_limits(draft_max_seq_len=None, draft_len=0))
    none.set_speculation(True)
    start(none, 3)
    assert schedule(none).draft_lens.tolist() == [-1]


def test_a_drafter_without_a_store_has_no_bonus_hole_no_context_and_nothing_to_catch_up() -> None:
    scheduler = Scheduler(with_limits(draft_max_seq_len=None, block_size=1))
    running = scheduler.add(make_request(0, [1] * 40))
    commit(scheduler, schedule(scheduler), [5])
    plan = schedule(scheduler)
    assert (plan.draft_lens.tolist(), plan.catch_up.tolist()) == ([3], [0])
    commit(scheduler, plan, [6, 6, 6, 6])
    assert scheduler.num_cached_blocks == len(running.token_ids) - 1, "the target lacks the newest token alone"


def test_statistics_count_the_drafts_that_were_verified_and_not_those_that_were_asked_for() -> None:
    scheduler = Scheduler(with_limits(draft_max_seq_len=None))
    running = scheduler.add(make_request(0, [1] * 3, max_tokens=50))
    commit(scheduler, schedule(scheduler), [5])
    for verified, tokens in ((0, [6]), (2, [6, 6]), (3, [6, 6, 6, 6])):
        plan = schedule(scheduler)
        assert plan.draft_lens.tolist() == [3]
        scheduler.commit(plan, [len(tokens)], [tokens], [verified])
    statistics = running.statistics
    assert (statistics.num_rounds, statistics.num_draft_tokens, statistics.num_accepted_draft_tokens) == (3, 5, 4)
    assert statistics.acceptance_histogram == [1, 1, 0, 1]


@pytest.mark.parametrize(("verified", "count"), [(4, 1), (1, 3)])
def test_a_report_of_more_than_was_drafted_is_a_defect_that_is_seen(verified: int, count: int) -> None:
    scheduler = Scheduler(with_limits(draft_max_seq_len=None))
    start(scheduler, 3)
    with pytest.raises(RuntimeError, match=f"verified {verified} of 3"):
        scheduler.commit(schedule(scheduler), [count], [[6] * count], [verified])


def test_a_draft_out_of_texts_is_neither_foreseen_nor_waited_for() -> None:
    scheduler = Scheduler(LIMITS)
    start(scheduler, 3, 3, 3)
    statistics = [running.statistics for running in scheduler._requests.values()]
    plan = schedule(scheduler)
    scheduler.commit(plan, [3, 3, 0], [[6] * 3] * 3, [3, 3, 3], [True, True, True], [0, 3, 2])
    assert [one.foresight.hit_rate for one in statistics] == [1.0, None, None]
    found = [(one.num_suffix_draft_tokens, one.num_accepted_suffix_draft_tokens) for one in statistics]
    assert found == [(0, 0), (3, 2), (0, 0)], "a row that failed has verified nothing"


def test_cancel_takes_a_waiting_or_a_running_request_out() -> None:
    scheduler = Scheduler(with_limits(max_batch_size=1))
    first, second = scheduler.add(make_request(0, [1] * 5)), scheduler.add(make_request(1, [1] * 5))
    plan = schedule(scheduler)
    assert scheduler.cancel(1) and second.finish_reason is FinishReason.CANCELLED and scheduler.num_waiting == 0
    assert scheduler.cancel(0) and first.finish_reason is FinishReason.CANCELLED and scheduler.num_running == 0
    assert not scheduler.cancel(0) and not scheduler.cancel(99)
    assert scheduler.idle_is_whole() and scheduler.num_outstanding == 1
    assert commit(scheduler, plan, [5]) == [] and output_of(first) == []
    scheduler.add(make_request(0, [1]))
    assert schedule(scheduler).dropped_rows == (0,)


@pytest.mark.parametrize(
    ("changes", "length", "numbers"),
    [
        ({"max_seq_len": 20}, 20, ["20 tokens", "max_seq_len 20", "room for 19", "raise scheduler.max_seq_len within"]),
        ({"max_seq_len": 20, "has_longer_context": False}, 20, ["room for 19; shorten it$"]),
        ({"num_blocks": 5}, 16, ["16 tokens", "needs 17", "holds 16", "4 blocks of 4"]),
        ({}, 0, ["0 tokens"]),
        ({"max_waiting": 1}, 3, ["1 completions wait", "max_waiting is 1"]),
    ],
)
def test_refused_request_says_the_numbers_and_the_others_go_on(
    changes: dict[str, int], length: int, numbers: list[str]
) -> None:
    job = Job(with_limits(**changes))
    job.add(make_request(0, [1, 2, 3]))
    with pytest.raises(InvalidRequestError) as caught:
        job.scheduler.limits.check_prompt(length)  # as who adds it has to
        job.scheduler.check_room(1)
    told = f"{caught.value}$"
    assert all(number in told for number in numbers) and "\n" not in told
    job.run([])


def test_longest_prompts_that_fit_give_one_token() -> None:
    for limits, length in ((with_limits(max_seq_len=20), 19), (with_limits(num_blocks=5), 15)):
        job = Job(limits)
        running = job.add(make_request(0, [1] * length))
        job.run([])
        assert len(output_of(running)) == 1


def test_request_id_in_use_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(make_request(3, [1]))
    with pytest.raises(ValueError, match="request_id 3"):
        scheduler.add(make_request(3, [1]))


def test_commit_refuses_what_does_not_fit_the_plan() -> None:
    scheduler = Scheduler(with_limits(plans_ahead=1))
    scheduler.add(make_request(0, [1] * 5))
    first, second = schedule(scheduler), schedule(scheduler)
    with pytest.raises(RuntimeError, match="round 1 but the round due is 0"):
        commit(scheduler, second, [5])
    with pytest.raises(RuntimeError, match="2 counts and 2 token lists for 1 rows"):
        commit(scheduler, first, [5], [5])
    with pytest.raises(RuntimeError, match=r"request 0 got 2 tokens .* verified 0"):
        commit(scheduler, first, [5, 5])


def test_idle_means_whole() -> None:
    scheduler = Scheduler(LIMITS)
    assert scheduler.idle_is_whole()
    start(scheduler, 9)
    with pytest.raises(RuntimeError, match="not idle: 1 running"):
        scheduler.idle_is_whole()
    block = scheduler._requests[0].table.blocks[0]
    scheduler._batch.pool.acquire(block)
    scheduler.cancel(0)
    with pytest.raises(RuntimeError, match=f"not whole: block {block} has 1 references"):
        scheduler.idle_is_whole()
    scheduler._batch.pool.release(block)
    assert scheduler.idle_is_whole()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_size": 0}, {"max_num_tokens": 0}, {"max_seq_len": 1}, {"draft_len": -1}, {"block_size": 0},
        {"num_blocks": 1}, {"plans_ahead": 2}, {"max_waiting": 0}, {"draft_max_seq_len": 0},
    ],
)  # fmt: skip
def test_limits_are_checked(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} must be .*, not {next(iter(changes.values()))}"):
        with_limits(**changes)


def test_long_prompts_get_rows_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are in the cache, and nothing of them is to be read: ranks are told all tokens."""
    monkeypatch.setattr(admission, "MOST_ANNOUNCED", 40)
    scheduler = Scheduler(with_limits(max_num_tokens=256))
    for number, length in enumerate((50, 20, 20, 10)):
        scheduler.add(make_request(number, [1] * length, 2))
    assert [len(admitted.tokens) for admitted in schedule(scheduler).admissions] == [50]
    scheduler = Scheduler(with_limits(max_num_tokens=256))
    for number in range(4):
        scheduler.add(make_request(number, [1] * 20, 2))
    assert [len(admitted.tokens) for admitted in schedule(scheduler).admissions] == [20, 20]


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_a_row_that_waits_for_its_guide_loses_its_place_until_that_is_built(plans_ahead: int) -> None:
    scheduler = Scheduler(with_limits(plans_ahead=plans_ahead, draft_len=0))
    guide = Guide("regex", "a*")
    for number, guided in enumerate((guide, None)):
        request = make_request(number, [1] * 5, 9)
        scheduler.add(replace(request, sampling=replace(request.sampling, guided=guided)))
    assert scheduler.take_guide_orders().begun == (GuideStart(guide),)
    scheduler.note_built(GuideStart(guide))
    plans = [schedule(scheduler) for _ in range(1 + plans_ahead)]
    assert plans[0].sampled_rows == [0, 1]
    (row,) = scheduler.commit(plans.pop(0), [WAITS, 1], [[], [7]])
    assert row.completion.request.request_id == 1 and scheduler.num_preempted == 1
    assert scheduler.take_guide_orders().begun == (), "as nothing came since, it is what is built"
    plans.append(schedule(scheduler))
    if plans_ahead:  # what was planned before belongs to nobody
        assert [row.new_token_ids for row in scheduler.commit(plans.pop(0), [1, 1], [[3], [7]])] == [[7]]
    (plan,) = plans
    assert [admitted.request_id for admitted in plan.admissions] == [0] and plan.dropped_rows == (0,)
    gained = {0: 4, 1: 7}
    scheduler.commit(plan, [1] * 2, [[gained[row]] for row in plan.sampled_rows])
    plan = schedule(scheduler)
    scheduler.commit(plan, [WAITS_ALONE if row == 0 else 1 for row in plan.sampled_rows], [[7]] * 2)
    start = GuideStart(guide, (4,), is_alone=True)
    orders = scheduler.take_guide_orders()
    assert orders.begun == (start,) and orders.over == (GuideStart(guide),)
    assert schedule(scheduler).sampled_rows == [1], "the other goes on"
    assert scheduler.cancel(0) and scheduler.take_guide_orders().over == (start,)
