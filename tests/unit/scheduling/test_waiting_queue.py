"""Whose turn it is: groups by their rows, preempted completions before all, and nothing kept of those that are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_simulation import make_request

from trtrun.core.guide import Guide, GuideStart
from trtrun.core.sampling_params import SamplingParams
from trtrun.kvcache.block_table import BlockTable
from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix_cache import PrefixCache
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.queue import WaitingQueue

POOL = BlockPool(2)


class Queue:
    """A queue of completions that are told apart by a name, whose first letter is their group's."""

    def __init__(self, *names: str) -> None:
        self.queue = WaitingQueue()
        self.named: dict[str, Completion] = {}
        self.add(*names)

    def add(self, *names: str) -> None:
        for name in names:
            table = BlockTable(POOL, PrefixCache(POOL), 1)
            self.named[name] = Completion(make_request(len(self.named), [1]), table, [1], group=name[0])
            self.queue.add(self.named[name])

    def hold(self, *names: str) -> None:
        """These come, and need a guide each, of their name."""
        for name in names:
            table = BlockTable(POOL, PrefixCache(POOL), 1)
            request = replace(make_request(len(self.named), [1]), sampling=SamplingParams(guided={"regex": name}))
            start = GuideStart(Guide("regex", name))
            self.named[name] = Completion(request, table, [1], group=name[0], guide_start=start)
            self.queue.add(self.named[name], is_held=True)

    def release(self, *names: str) -> None:
        """Their guides are built."""
        for name in names:
            self.queue.release(GuideStart(Guide("regex", name)))

    def held(self) -> list[str]:
        return [start.guide.text for start in self.queue.held_starts()]

    def take(self, *names: str) -> None:
        """These get a row, each when it is next."""
        for name in names:
            assert self.in_turn()[0] == name
            self.queue.take(self.named[name])

    def preempt(self, *names: str) -> None:
        """These lose their rows, the most recently admitted first."""
        for name in names:
            self.queue.put_back(self.named[name])

    def hold_again(self, *names: str) -> None:
        """These lose their rows, and what they go on with is not built."""
        for name in names:
            self.queue.put_back(self.named[name], is_held=True)

    def end(self, *names: str) -> None:
        """These have ended in their rows."""
        for name in names:
            self.queue.end_row(self.named[name])

    def remove(self, *names: str) -> None:
        """These are cancelled while they wait."""
        for name in names:
            self.queue.remove(self.named[name])

    def in_turn(self) -> list[str]:
        names = {id(completion): name for name, completion in self.named.items()}
        return [names[id(completion)] for completion in self.queue.in_turn()]


def test_the_group_with_the_fewest_rows_is_next_whenever_it_came() -> None:
    queue = Queue("a1", "a2", "a3", "a4")
    queue.take("a1", "a2")
    queue.add("b1", "b2", "b3")
    assert queue.in_turn() == ["b1", "a3"]
    queue.take("b1")
    assert queue.in_turn() == ["b2", "a3"], "one row against two"
    queue.take("b2")
    assert queue.in_turn() == ["a3", "b3"], "of two with as many, the one whose number has changed longer ago"
    queue.end("b1")
    assert queue.in_turn() == ["b3", "a3"]


def test_a_group_is_the_same_one_as_long_as_any_of_it_runs_or_waits() -> None:
    queue = Queue("a1", "a2", "c1", "c2")
    queue.take("a1", "c1", "a2")
    queue.end("a1", "c1")
    queue.add("a3", "b1")
    assert queue.in_turn() == ["c2", "b1", "a3"], "a still has a row"
    queue.take("c2", "b1", "a3")
    queue.end("a2", "a3", "b1", "c2")
    assert not queue.queue._groups


def test_preempted_ones_come_alone_and_the_earliest_admitted_first() -> None:
    queue = Queue("a1", "b1", "c1", "d1")
    queue.take("a1", "b1", "c1")
    queue.preempt("c1", "b1")
    assert queue.in_turn() == ["b1"] and len(queue.queue) == 3 and queue.queue.num_preempted == 2
    queue.take("b1")
    assert queue.in_turn() == ["c1"]
    queue.take("c1")
    assert queue.in_turn() == ["d1"]


def test_a_preempted_row_does_not_count_until_it_is_back() -> None:
    queue = Queue("a1", "a2", "a3", "b1", "b2", "b3")
    queue.take("a1", "b1", "a2", "b2")
    queue.preempt("b2")
    queue.take("b2")
    assert queue.in_turn() == ["a3", "b3"], "two rows each, and b's number has just changed"
    queue.preempt("b2")
    queue.remove("b2")
    assert queue.in_turn() == ["b3", "a3"], "one row against two"


@pytest.mark.parametrize("end", ["in their rows", "while they wait", "preempted"])
def test_nothing_is_kept_of_groups_that_are_gone(end: str) -> None:
    queue = Queue("a1", "a2", "b1")
    if end == "while they wait":
        queue.remove("a2", "b1", "a1")
    else:
        queue.take("a1", "b1", "a2")
        if end == "preempted":
            queue.preempt("a2", "b1", "a1")
            queue.remove("b1", "a1", "a2")
        else:
            queue.preempt("a2")
            queue.take("a2")
            queue.end("a1", "b1", "a2")
    assert len(queue.queue) == 0 and queue.in_turn() == []
    assert not queue.queue._groups and not queue.queue._owners_waiting


def test_the_number_that_waits_of_a_group_leaves_out_rows_and_others() -> None:
    queue = Queue("a1", "a2", "a3", "b1")
    queue.take("a1")
    assert [queue.queue.num_waiting_of(group) for group in "abc"] == [2, 1, 0]


def test_who_is_held_is_passed_by_and_keeps_its_place() -> None:
    queue = Queue("a1")
    queue.hold("a2", "b1", "b2")
    queue.add("a3", "b3", "c1")
    queue.hold("d1")
    queue.add("e1")
    assert queue.in_turn() == ["a1", "b3", "c1", "e1"] and queue.held() == ["a2", "b1", "d1", "b2"]
    assert (len(queue.queue), queue.queue.num_ready, queue.queue.num_waiting_of("b")) == (9, 5, 3)
    queue.release("d1", "b2", "a2")
    assert queue.in_turn() == ["a1", "b2", "c1", "d1", "e1"], "b2 came before b3, and d before e"
    queue.take("a1", "b2", "c1", "d1", "e1")
    assert queue.in_turn() == ["a2", "b3"], "the others of their groups, b1 is still held"
    queue.take("a2", "b3", "a3")
    assert queue.in_turn() == [] and queue.held() == ["b1"] and queue.queue.num_ready == 0
    queue.release("b1")
    assert queue.in_turn() == ["b1"] and queue.held() == []


def test_who_is_held_can_be_removed() -> None:
    queue = Queue()
    queue.hold("a1", "a2", "b1")
    queue.add("a3")
    queue.remove("a1", "b1")
    assert queue.in_turn() == ["a3"] and queue.held() == ["a2"] and set(queue.queue._groups) == {(None, "a")}
    queue.remove("a3", "a2")
    assert len(queue.queue) == queue.queue.num_ready == 0 and not queue.queue._groups and not queue.queue._holding


def test_one_that_lost_its_row_is_passed_while_it_is_held() -> None:
    """And goes before all others once it is released."""
    queue = Queue("a1", "b1")
    queue.hold("c1")
    queue.release("c1")
    queue.take("a1", "b1", "c1")
    queue.hold_again("c1")
    queue.preempt("b1")
    queue.add("d1")
    assert queue.held() == ["c1"] and queue.in_turn() == ["b1"]
    queue.take("b1")
    assert queue.in_turn() == ["d1"] and queue.queue.num_ready == 1
    queue.release("c1")
    assert queue.in_turn() == ["c1"] and queue.held() == [] and queue.queue.num_ready == 2
    queue.take("c1")
    queue.hold_again("c1")
    queue.remove("c1")
    assert queue.held() == [] and queue.in_turn() == ["d1"] and len(queue.queue) == 1
