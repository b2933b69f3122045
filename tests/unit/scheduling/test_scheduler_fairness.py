"""Who gets a row and a round's tokens when many want them: nobody waits behind one who asks for much, and nobody
waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from scheduler_simulation import make_request

from trtrun.core.nouns import RoundPlan
from trtrun.errors import QueueFullError
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.queue import has_share
from trtrun.scheduling.scheduler import Scheduler


class Rounds:
    """A scheduler whose rows gain one token a round."""

    def __init__(
        self, rows: int = 4, budget: int = 64, num_blocks: int = 1000, draft_len: int = 0, reuse: bool = True
    ) -> None:
        limits = SchedulerLimits(rows, budget, 2000, None, draft_len, 4, num_blocks, reuse)
        self.scheduler = Scheduler(limits)
        self.rows: dict[int, int] = {}
        self.admitted: list[int] = []
        self.read: dict[int, list[int]] = {}
        self.plans: list[RoundPlan] = []
        self._number = 0

    def add(
        self,
        length: int = 3,
        max_tokens: int = 4,
        group: str | None = None,
        first: int | None = None,
        owner: str | None = None,
    ) -> int:
        """Ask for a completion of a prompt of its own, or of one that begins with `first`."""
        number = self._number
        self._number += 1
        prompt = [number % 199 if first is None else first, *[number % 7 if first is None else 1] * (length - 1)]
        self.scheduler.add(make_request(number, prompt, max_tokens), group=group, owner=owner)
        return number

    def step(self) -> RoundPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        for admission in plan.admissions:
            self.rows[admission.row] = admission.request_id
            self.admitted.append(admission.request_id)
        for chunk in plan.prefill:
            self.read.setdefault(self.rows[chunk.row], []).append(chunk.length)
        self.scheduler.commit(plan, [1] * len(plan.sampled_rows), [[5]] * len(plan.sampled_rows))
        return plan

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 5000) -> int:
        """Take rounds until there is nothing to do; returns how many."""
        for count in range(most):
            if until() or self.step() is None:
                return count
        raise AssertionError("it never ends")


def test_a_request_of_many_completions_gives_the_next_rows_to_others() -> None:
    rounds = Rounds()
    many = [rounds.add(group="many", max_tokens=4 + number % 3) for number in range(40)]
    rounds.step()
    others = [rounds.add() for _ in range(3)]
    rounds.run()
    assert rounds.admitted[:7] == many[:4] + others
    assert rounds.admitted[7:] == many[4:], "and goes on with all rows afterwards"


def test_two_large_requests_have_half_of_the_rows_each() -> None:
    rounds = Rounds(rows=8)
    first = {rounds.add(group="first", max_tokens=3 + number % 5) for number in range(40)}
    rounds.step()
    for _ in range(40):
        rounds.add(group="second", max_tokens=3 + number_of_rows(rounds, first) % 5)
    held = []
    while len(rounds.admitted) < 60:
        rounds.step()
        held.append(number_of_rows(rounds, first))
    assert set(held[8:]) <= {2, 3, 4, 5}, "less those that have just ended"


def number_of_rows(rounds: Rounds, of: set[int]) -> int:
    return sum(running.request.request_id in of for running in rounds.scheduler._batch.requests)


def test_rows_are_shared_by_owner_first_and_then_by_request() -> None:
    """One with many requests has no more rows than one with two of many completions."""
    rounds = Rounds(rows=4)
    hog = {rounds.add(owner="hog", max_tokens=3 + number % 5) for number in range(60)}
    rounds.step()
    few = {rounds.add(owner="few", group="ab"[number % 2], max_tokens=3 + number % 5) for number in range(30)}
    held, admitted = [], []
    while set(rounds.admitted[-1:]) <= hog or len(rounds.admitted) < 40:
        rounds.step()
        held.append(number_of_rows(rounds, hog))
        admitted = rounds.admitted
    assert max(held[12:]) < 4 and sum(held[12:]) <= 2 * len(held[12:]), "half of the rows, and less as they end"
    of_few = [number for number in admitted if number in few][:8]
    assert [number % 2 for number in of_few] == [0, 1] * 4, "in turns between the owner's requests"
    rounds.run()
    assert not rounds.scheduler._waiting._owners and rounds.scheduler.idle_is_whole()


def test_an_owner_without_rows_is_given_one_and_no_row_is_given_up_twice() -> None:
    """A small request does not wait until one of many long ones ends; what is computed again is bounded."""
    rounds = Rounds(rows=4)
    hog = [rounds.add(owner="hog", max_tokens=200) for _ in range(6)]
    rounds.run(until=lambda: len(rounds.plans) == 5)
    statistics = {number: rounds.scheduler._requests[number].statistics for number in hog}
    for number in range(5):
        small = rounds.add(owner="small", max_tokens=2)
        began = len(rounds.plans)
        rounds.run(until=lambda: small not in rounds.scheduler._requests)  # noqa: B023 - at once
        assert number >= 4 or len(rounds.plans) - began <= 3, "in the next round"
        rounds.step()  # in which the row is the other one's again
    preemptions = [statistics[number].num_preemptions for number in hog]
    assert max(preemptions) == 1 and sum(preemptions) == 4
    assert len(rounds.plans) < 400
    rounds.run()
    assert rounds.scheduler.idle_is_whole()


def test_a_row_that_is_given_up_goes_to_whom_it_was_taken_for() -> None:
    """Not back to who gave it up, of whose prompt less is left to read; and not before the long one is read."""
    rounds = Rounds(rows=3)
    hog = [rounds.add(length, owner="hog", max_tokens=100) for length in (1500, 8, 8)]
    rounds.run(until=lambda: len(rounds.plans) == 3)
    assert number_of_rows(rounds, {*hog}) == 3
    small = rounds.add(1800, owner="small", max_tokens=2)
    rounds.run(until=lambda: small in rounds.admitted, most=40)
    requests = [rounds.scheduler._requests[number] for number in hog]
    assert [request.statistics.num_preemptions for request in requests] == [0, 0, 1]
    rounds.run()

    rounds = Rounds(rows=4)
    hog = [rounds.add(length, owner="hog", max_tokens=100) for length in (1500, 200, 8, 8)]
    rounds.run(until=lambda: len(rounds.plans) == 3)
    small = rounds.add(300, owner="small", max_tokens=2)
    rounds.run(until=lambda: small in rounds.admitted, most=40)
    assert sum(rounds.scheduler._requests[number].statistics.num_preemptions for number in hog) == 1
    rounds.run()
    assert rounds.scheduler.idle_is_whole()


def test_an_owner_without_rows_is_given_blocks() -> None:
    rounds = Rounds(rows=8, num_blocks=61, budget=256)
    hog = [rounds.add(70, owner="hog", max_tokens=80) for _ in range(3)]  # 60 blocks of 4 hold three of them
    rounds.run(until=lambda: len(rounds.plans) == 4)
    assert number_of_rows(rounds, {*hog}) == 3
    small = rounds.add(40, owner="small", max_tokens=2)
    rounds.run(until=lambda: small in rounds.admitted, most=6)
    assert small in rounds.admitted and number_of_rows(rounds, {*hog}) == 2
    rounds.run()
    assert rounds.scheduler.idle_is_whole()


@pytest.mark.parametrize(
    ("count", "own", "total", "others", "has"),
    [
        (16, 0, 0, 0, True),  # alone all
        (1, 16, 16, 0, False),
        (1, 11, 11, 1, True),  # a quarter is kept
        (1, 12, 12, 1, False),
        (1, 3, 15, 1, True),  # for those with less than an equal part
        (2, 3, 15, 1, False),
        (10, 0, 6, 3, True),  # or a first one of any size
        (1, 4, 15, 3, False),
    ],
)
def test_places_are_shared_by_owner(count: int, own: int, total: int, others: int, has: bool) -> None:
    assert has_share(count, own, total, 16, others) is has


def test_one_owner_does_not_fill_the_queue_for_others() -> None:
    rounds = Rounds(rows=1)
    scheduler = rounds.scheduler = Scheduler(replace(rounds.scheduler.limits, max_waiting=8))
    for _ in range(5):
        rounds.add(owner="hog")
    rounds.add(owner="small")
    with pytest.raises(QueueFullError, match="the queue is full: 6 completions wait, 1 more"):
        scheduler.check_room(1, "hog")
    scheduler.check_room(2, "small")


def test_a_stream_of_newcomers_keeps_nobody_waiting() -> None:
    """One comes each round, as many as there are rows for."""
    rounds = Rounds(rows=2)
    many = [rounds.add(group="many", max_tokens=2) for _ in range(6)]
    for _ in range(80):
        rounds.add(max_tokens=2)
        rounds.step()
    places = [rounds.admitted.index(number) for number in many]
    assert places == sorted(places)
    # The group is behind those that had come when its last row ended.
    assert max(later - earlier for earlier, later in pairwise(places)) < 8, places


def test_those_of_one_group_come_in_order_of_arrival_and_may_be_cancelled_anywhere() -> None:
    rounds = Rounds(rows=1)
    numbers = [rounds.add(group="ab"[number % 2]) for number in range(8)]
    assert rounds.scheduler.cancel(numbers[0]) and rounds.scheduler.cancel(numbers[5])
    rounds.run()
    assert rounds.admitted == [2, 1, 4, 3, 6, 7], "in turns"
    assert not rounds.scheduler._waiting._groups and rounds.scheduler.idle_is_whole()


def test_a_short_prompt_is_read_beside_a_long_one_and_the_long_one_gets_its_half() -> None:
    rounds = Rounds()
    long = rounds.add(1500)
    rounds.step()
    assert rounds.read[long] == [64]
    short = rounds.add(5)
    plan = rounds.step()
    assert plan is not None and rounds.read[short] == [5] and rounds.rows[plan.sampled_rows[-1]] == short
    assert rounds.read[long] == [64, 59]
    second, late = rounds.add(1600), rounds.add(50)
    rounds.step()
    assert second not in rounds.read, "it is not admitted before it is read"
    assert rounds.read[late] == [31] and rounds.read[long][-1] == 32, "one token is the decoding row's"


def test_of_two_that_are_being_read_the_one_with_less_left_is_done_first() -> None:
    rounds = Rounds()
    long = rounds.add(1500)
    rounds.step()
    medium = rounds.add(120)
    rounds.run(until=lambda: sum(rounds.read.get(medium, [])) == 120)
    assert rounds.read[medium] == [32, 32, 32, 24] and rounds.read[long] == [64, 32, 32, 32, 40]


def test_a_long_prompt_whose_start_is_in_the_cache_is_a_short_one() -> None:
    rounds = Rounds()
    rounds.add(101, first=9)
    rounds.run()
    rounds.add(150)
    rounds.step()
    known = rounds.add(101, first=9)
    rounds.step()
    assert rounds.read[known] == [1], "86 tokens of the other one are left, and of this one all but the last are there"


def test_what_the_last_prompts_leave_of_a_round_goes_to_the_next_one_at_once() -> None:
    rounds = Rounds()
    first = rounds.add(70)
    rounds.step()
    longer = rounds.add(30)
    rounds.step()
    assert rounds.read == {first: [64, 6], longer: [30]}


def test_a_stream_of_short_prompts_leaves_half_of_each_round_to_the_long_one() -> None:
    rounds = Rounds(rows=8)
    long = rounds.add(1500)
    count = 0
    while sum(rounds.read.get(long, [])) < 1500:
        for _ in range(6):
            rounds.add(20, max_tokens=1)
        rounds.step()
        count += 1
    assert count <= 1500 / 32 + 1
    assert sum(len(chunks) for number, chunks in rounds.read.items() if number != long) > count


def test_prompts_of_one_length_are_read_one_after_the_other() -> None:
    rounds = Rounds(budget=32)
    numbers = [rounds.add(100, group="call" if index % 2 else None) for index in range(4)]
    rounds.run()
    assert rounds.admitted == numbers
    sizes = [rounds.read[number] for number in numbers]
    assert all(len(chunks) <= 5 for chunks in sizes), "no prompt is read in more pieces than it takes"


def test_completions_of_one_long_prompt_read_it_once() -> None:
    rounds = Rounds(rows=16, budget=64)
    for _ in range(16):
        rounds.add(600, group="many", first=9)
    rounds.run()
    read = sum(sum(chunks) for chunks in rounds.read.values())
    # Blocks of 4, the last token again, and the second row comes while the first one reads its last blocks.
    assert 600 <= read < 600 + 64 + 16 * 5


def test_who_waits_for_blocks_is_passed_by_a_bounded_number_of_times() -> None:
    rounds = Rounds(rows=3, num_blocks=41, reuse=False)
    running = rounds.add(80, max_tokens=60)
    rounds.step()
    rounds.step()
    large = rounds.add(100)
    small = [rounds.add(4, max_tokens=2) for _ in range(20)]
    rounds.run()
    place = rounds.admitted.index(large)
    assert rounds.admitted[0] == running
    assert 1 < place <= 4, rounds.admitted
    assert rounds.admitted[1:place] == small[: place - 1]
    assert sorted(rounds.admitted) == [running, large, *small]


def test_nobody_passes_a_preempted_one() -> None:
    rounds = Rounds(rows=3, num_blocks=16, reuse=False)
    first, second = rounds.add(12, max_tokens=30), rounds.add(12, max_tokens=30)
    rounds.run(until=lambda: rounds.scheduler._requests[second].statistics.num_preemptions > 0)
    small = [rounds.add(2, max_tokens=2) for _ in range(5)]
    rounds.run()
    assert rounds.admitted == [first, second, second, *small]


@pytest.mark.parametrize("share", [4])
def test_drafts_leave_prompts_a_share_of_a_round_that_they_could_fill(share: int) -> None:
    rounds = Rounds(rows=8, budget=40, draft_len=6)
    for _ in range(6):
        rounds.add(max_tokens=200)
    plan = rounds.step()
    plan = rounds.step()
    assert plan is not None and sum(plan.draft_lens.tolist()) + 6 == 40, "without prompts drafts take all"
    late = rounds.add(30)
    plan = rounds.step()
    assert plan is not None and rounds.read[late] == [40 // share] and (plan.draft_lens >= 0).all()
