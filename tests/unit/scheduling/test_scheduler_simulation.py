"""The scheduler under two fake engines whose output depends on every slot they read: all semantics at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_simulation import VOCABULARY, Job, make_request
from windowed_limits import with_windows

from trtrun.errors import ConfigError
from trtrun.scheduling import admission
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.scheduler import Scheduler, SchedulerLimits

PROFILE = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def limits(draw: st.DrawFn, plans_ahead: int | None = None) -> SchedulerLimits:
    most = draw(st.sampled_from([1, 2, 3, 7, 16, 64]))
    return SchedulerLimits(
        max_batch_size=draw(st.integers(1, 5)),
        max_num_tokens=most,
        max_shared_tokens=draw(st.one_of(st.none(), st.integers(1, most))),
        max_seq_len=draw(st.integers(8, 48)),
        draft_max_seq_len=draw(st.one_of(st.none(), st.integers(1, 48))),
        draft_len=draw(st.integers(0, 6)),
        block_size=draw(st.integers(1, 5)),
        num_blocks=draw(st.integers(10, 40)),
        enable_block_reuse=draw(st.booleans()),
        plans_ahead=draw(st.integers(0, 1)) if plans_ahead is None else plans_ahead,
        prompt_tile=draw(st.sampled_from([None, 1, 2, 5, 16])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[SchedulerLimits, list, int, float]:
    chosen = draw(limits())
    if draw(st.booleans()):
        window, chunk = draw(st.sampled_from([1, 2, 5, 8, 20])), draw(st.sampled_from([1, 4, 10, 64]))
        chosen = with_windows(chosen, window, chunk, draw(st.integers(1, 3)))
    longest = min(chosen.max_length - 1, 24)
    prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=longest)
    stems = draw(st.lists(prompts, min_size=1, max_size=2))
    requests = []
    for number in range(draw(st.integers(1, 8))):
        # Prompts share stems, so that reuse happens; some are equal to an earlier one.
        stem, tail = draw(st.sampled_from(stems)), draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=6))
        stop = draw(st.sampled_from([(), (0,), (1, 2)]))
        plain = draw(st.sampled_from([None, None, 0]))
        requests.append(make_request(number, (stem + tail)[:longest], draw(st.integers(1, 20)), stop, plain))
    return chosen, requests, draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))


@PROFILE
@given(jobs())
def test_output_equals_sequential_decoding_whatever_the_batch(job: tuple) -> None:
    chosen, requests, seed, acceptance = job
    ended = Job(chosen, seed, acceptance, num_owners=1 + seed % 3).run(requests)
    assert sorted(ended) == [request.request_id for request in requests]


@PROFILE
@given(jobs())
def test_cancelling_midway_leaves_the_others_and_the_pool_whole(job: tuple) -> None:
    chosen, requests, seed, acceptance = job
    ended = Job(chosen, seed, acceptance, num_owners=1 + seed % 3).run(requests, cancel=0.1)
    assert sorted(ended) == [request.request_id for request in requests]


def run_scarce(plans_ahead: int, reuse: bool, seed: int) -> Job:
    # Twelve blocks of 4 for 4 rows that grow to 10 blocks each: rows must be preempted.
    scarce = SchedulerLimits(4, 32, 40, 40, 3, 4, 13, reuse, plans_ahead)
    job = Job(scarce, seed, 0.8)
    job.run([make_request(number, [number % 3] * 9, 30) for number in range(6)])
    return job


def test_scarce_blocks_preempt_and_nothing_live_locks() -> None:
    for plans_ahead in (0, 1):
        for reuse in (False, True):
            for seed in range(5):
                job = run_scarce(plans_ahead, reuse, seed)
                preemptions = [r.statistics.num_preemptions for r in job.requests.values()]
                assert sum(preemptions) > 0
                assert preemptions[0] == 0, "the oldest row is never preempted"


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_scarce_places_preempt_and_nothing_live_locks(plans_ahead: int, reuse: bool) -> None:
    """Places for few rows as long as they get, and blocks for all: some read, others decode."""
    preempted = shared = 0
    for seed in range(10):
        plenty = SchedulerLimits(4, 16, 60, None, 3, 2, 200, reuse, plans_ahead)
        scarce = with_windows(plenty, window=20, chunk=6, most_rows=1)
        job = Job(replace(scarce, num_places=scarce.num_places + seed % 4), seed, 0.8)
        stems = [[], [1, 2, 3, 4, 5, 6] * 4, [], [2] * 15, []]
        job.run([make_request(number, stems[number % 5] + [number % 7] * 2, 40 - 4 * number) for number in range(9)])
        statistics = [running.statistics for running in job.requests.values()]
        preempted += sum(of_row.num_preemptions for of_row in statistics)
        shared += sum(of_row.num_cached_prompt_tokens for of_row in statistics)
    assert preempted and bool(shared) == reuse


def test_where_no_place_is_left_the_newest_prompt_gives_up_its_own() -> None:
    """So that the oldest is read on; whatever took the others."""
    plenty = SchedulerLimits(3, 12, 80, None, 0, 2, 200)
    job = Job(with_windows(plenty, window=20, chunk=6, most_rows=3))
    oldest, newest = job.add(make_request(0, [2] * 50, 2)), job.add(make_request(1, [3] * 40, 2))
    for _ in range(3):
        job.step()
    batch = job.scheduler._batch
    assert batch.windows is not None and job.scheduler.num_running == 2
    others = batch.pool.allocate(batch.windows.num_available)
    batch.windows.hold(others)
    job.step()
    assert newest.statistics.num_preemptions == 1 and not oldest.statistics.num_preemptions
    before = oldest.num_prefilled
    job.step()
    assert oldest.num_prefilled > before
    batch.windows.release(others)
    for block in others:
        batch.pool.release(block)
    job.run([])


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("is_fed_late", [False, True])
def test_what_the_draft_store_lacks_keeps_its_places(
    monkeypatch: pytest.MonkeyPatch, plans_ahead: int, is_fed_late: bool
) -> None:
    """Rounds without drafts, which it sits out, and then one with; also of prompts that it has not read yet."""
    monkeypatch.setattr(admission, "_FED_AT_ONCE", 0)
    job = Job(with_windows(SchedulerLimits(2, 64, 100, 100, 3, 2, 200, True, plans_ahead), 3, 4, 2), 1, 0.7)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    for number, is_unsure in enumerate([is_fed_late, False, is_fed_late]):
        job.is_unsure = is_unsure
        asked = job.add(make_request(number, prompt, 60))
        while job.scheduler.has_work or job.plans:
            job.most_drafted = 0 if job.num_rounds % 30 < 25 else None
            while len(job.plans) <= plans_ahead and job.schedule(changes_mind=False) is not None:
                pass
            job.execute()
            job.commit()
    assert asked.statistics.num_cached_prompt_tokens == 8
    job.check_outputs()


def test_after_a_reset_ranks_are_told_of_all_places() -> None:
    limits = with_windows(SchedulerLimits(2, 64, 60, None, 0, 2, 20), window=3, chunk=12, most_rows=2)
    scheduler = Scheduler(limits)
    scheduler.add(make_request(0, [1] * 9, 4))
    assert scheduler.schedule() is not None
    scheduler.reset()
    scheduler.add(make_request(1, [1] * 5, 4))
    plan = scheduler.schedule()
    assert plan is not None and sorted(plan.window_places[:, 0].tolist()) == list(range(1, 20))
    assert sorted(plan.window_places[:, 1].tolist())[-4:] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"num_places must be at least \d+, those of a row and the null place, not 3"):
        replace(limits, num_places=3)


def test_places_that_are_given_back_before_the_result_are_found_again() -> None:
    """Of chunks longer than the window, with a plan out that has written them and no result."""
    job = Job(with_windows(SchedulerLimits(2, 64, 60, None, 0, 2, 200, True, 1), window=3, chunk=12, most_rows=2))
    prompt = [1, 2, 3, 4, 5, 6] * 4
    for number in range(2):
        asked = job.add(make_request(number, prompt, 4))
        while job.scheduler.has_work or job.plans:
            while len(job.plans) <= 1 and job.schedule() is not None:
                pass
            job.execute()
            job.commit()
    assert asked.statistics.num_cached_prompt_tokens == len(prompt) - 2
    job.check_outputs()


def test_only_verified_blocks_are_shared() -> None:
    """Draft acceptance of 1 makes a bonus hole every round; the next request then reuses what it left."""
    reused = 0
    for plans_ahead in (0, 1):
        for block_size in (1, 2, 3, 4):
            for acceptance in (0.5, 1.0):
                job = Job(SchedulerLimits(2, 64, 60, 60, 3, block_size, 100, True, plans_ahead), 3, acceptance)
                first = job.add(make_request(0, [1, 2, 3, 4, 5], 20))
                while job.scheduler.has_work:
                    job.step()
                # The second prompt is the first one's whole text, so that blocks of its output are reused too.
                second = job.add(make_request(1, first.token_ids, 10))
                job.run([])
                reused += second.statistics.num_cached_prompt_tokens
                assert second.statistics.num_cached_prompt_tokens >= len(first.token_ids) - 2 - block_size
    assert reused > 0


def test_what_was_written_beyond_the_draft_context_is_shared_with_rows_that_it_does_not_follow() -> None:
    job = Job(SchedulerLimits(2, 64, 60, 12, 3, 2, 100, True, 0), 1, 1.0)
    first = job.add(make_request(0, [1, 2, 3, 4], 30))
    while job.scheduler.has_work:
        job.step()
    followed = job.add(make_request(1, first.token_ids[:10], 1))
    longer = job.add(make_request(2, first.token_ids, 5))
    job.run([])
    assert followed.statistics.num_cached_prompt_tokens == 8, "what the draft has written, too"
    assert longer.statistics.num_cached_prompt_tokens == 32, "all of 34 tokens but the newest, in blocks of 2"


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_rows_that_want_no_drafts_share_their_blocks_where_others_are_drafted(plans_ahead: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    job = Job(SchedulerLimits(2, 64, 60, 60, 3, 2, 100, True, plans_ahead), 1, 0.7)

    def run(number: int, tokens: list[int], draft_len: int | None) -> Completion:
        running = job.add(make_request(number, tokens, 6, draft_len=draft_len))
        job.run([])
        return running

    plain = run(0, prompt, 0)
    again = run(1, plain.token_ids, 0)
    assert again.statistics.num_cached_prompt_tokens == 12, "of 14 tokens, which end with the newest"
    drafted = run(2, plain.token_ids, None)
    assert drafted.statistics.num_cached_prompt_tokens == 0, "the draft has not written these"
    assert run(3, drafted.token_ids, None).statistics.num_cached_prompt_tokens >= 14, "now it has"
    assert run(4, drafted.token_ids, 0).statistics.num_cached_prompt_tokens >= 14


def test_speculation_can_be_switched_between_requests() -> None:
    job = Job(SchedulerLimits(2, 16, 60, 60, 3, 2, 60, True, 1), 1, 0.9)
    for number, enabled in enumerate([True, False, False, True]):
        job.scheduler.set_speculation(enabled)
        before = job.requests[number - 1].token_ids if number else [1, 2, 3]
        running = job.add(make_request(number, before, 8))
        job.run([])
        assert (running.statistics.num_draft_tokens > 0) == enabled
        assert (running.statistics.num_cached_prompt_tokens > 0) == (number == 2)
