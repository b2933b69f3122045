"""Rounds that the device has before their drafts are there: what is told to whom, and when, with a gate and messages of
the test's own. That a device waits is in test_device_gate.py, on a GPU."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from open_gates import (
    DRAFT_RANK,
    TARGET_RANK,
    Decided,
    Drafted,
    Letters,
    expect,
    make_exchange,
    make_plan,
    packet,
)

from parallel.transports.solo import SoloCommunicator
from trtrun.rounds.exchange.message_exchange import MessageExchange
from trtrun.rounds.round import Worker
from trtrun.speculation.drafter import Drafter
from trtrun.wire.messages import DRAFT_TAG, VERDICT_TAG, encode_packet


@pytest.fixture
def letters() -> Letters:
    return Letters()


def test_a_round_is_launched_before_the_verdict_that_its_draft_follows(letters: Letters) -> None:
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(5), make_plan(6, (0, 0))]
    letters.came[DRAFT_TAG].append(packet(4, [[11, 12, 13], [21, 22, 0]], [3, 2], [1, 0]))
    first = expect(exchange, plans[0])
    rounds = [exchange.conclude(plans[0], Decided(plans[0]))]
    second = expect(exchange, plans[1])
    rounds.append(exchange.conclude(plans[1], Decided(plans[1])))
    assert exchange.transfer_draft(plans[2], None, ()) is None  # nothing is drafted in it
    rounds.append(exchange.conclude(plans[2], Decided(plans[2])))
    assert letters.posted == [] and (first.tokens == -1).all()
    rounds[0].release()
    assert first.draft_lens.tolist() == [3, 2] and first.tokens.tolist() == [[11, 12, 13], [21, 22, 0]]
    assert letters.posted == [] and (second.tokens == -1).all()
    assert rounds[0].finish().cache_hits.tolist() == [1, 0]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, 4)]
    # A packet that came too late for its round, and one that is narrower than what was asked for.
    letters.came[DRAFT_TAG] += [packet(4, [[9], [9]], [1, 1], [1, 1]), packet(5, [[31], [0]], [1, 0], [0, 1])]
    for one in rounds[1:]:
        one.release()
    assert second.draft_lens.tolist() == [1, 0] and second.tokens.tolist() == [[31, 0, 0], [0, 0, 0]]
    assert [one.finish().cache_hits.tolist() for one in rounds] == [[1, 0], [0, 1], [0, 0]]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, index) for index in (4, 5, 6)]


def test_a_draft_that_does_not_come_is_none(letters: Letters) -> None:
    exchange, plan = make_exchange(letters), make_plan(0)
    draft = expect(exchange, plan)
    report = exchange.conclude(plan, Decided(plan)).finish()
    assert draft.draft_lens.tolist() == [0, 0] and report.cache_hits.tolist() == [0, 0]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, 0)]


@pytest.mark.parametrize("verified", [0, 1])
def test_a_draft_that_was_there_too_late_for_the_device_counts_as_none(letters: Letters, verified: int) -> None:
    exchange, plan = make_exchange(letters), make_plan(4)
    letters.came[DRAFT_TAG].append(packet(4, [[1], [1]], [1, 1], [1, 0]))
    expect(exchange, plan)
    assert exchange.conclude(plan, Decided(plan, verified)).finish().cache_hits.tolist() == [verified, 0]


def test_a_round_that_needs_its_draft_on_the_host_has_it_before_it_is_launched(letters: Letters) -> None:
    """The verdict before is told first, without which no draft would come."""
    exchange = make_exchange(letters, needs_draft=lambda plan: plan.round_index == 8)
    plans = [make_plan(7), make_plan(8)]
    expect(exchange, plans[0])
    before = exchange.conclude(plans[0], Decided(plans[0]))
    letters.came[DRAFT_TAG] += [packet(7, [[1], [1]], [1, 1], [0, 0]), packet(8, [[5, 6], [7, 8]], [2, 2], [1, 1])]
    draft = expect(exchange, plans[1])
    assert draft.tokens.tolist() == [[5, 6, 0], [7, 8, 0]] and letters.posted == [(DRAFT_RANK, VERDICT_TAG, 7)]
    after = exchange.conclude(plans[1], Decided(plans[1]))
    assert [one.finish().cache_hits.tolist() for one in (before, after)] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("is_here", [False, True])
def test_a_rank_that_drafts_does_not_wait_for_the_verdict_within_a_round(letters: Letters, is_here: bool) -> None:
    """It may be told of the next plan meanwhile, but does not begin with it; nor with a verdict that is there."""
    exchange = MessageExchange(
        mail=letters, rank=DRAFT_RANK, draft_ranks=(DRAFT_RANK,), target_ranks=(TARGET_RANK,),
        peers=SoloCommunicator(), draft_peer=0, target_peer=1, group=None, target_vocab_size=100, use_logits=False,
    )  # fmt: skip
    drafter, verdict = Drafted(), encode_packet(3, np.array([[1, 42]], dtype=np.int64))
    worker = Worker(exchange, cast(Drafter, drafter), None, leads_draft=True, leads_target=False, use_logits=False)
    if is_here:
        letters.came[VERDICT_TAG].append(verdict)
    launched = worker.launch_round(make_plan(3, (0,)))
    if not is_here:
        assert not launched.may_be_followed and not launched.is_done() and drafter.seen == []
        letters.came[VERDICT_TAG].append(verdict)
    assert launched.is_done()
    report = launched.finish()
    assert report is not None and report.round_index == 3 and drafter.seen == [[42]]


def test_rounds_of_the_same_number_have_openings_of_their_own(letters: Letters) -> None:
    """As warm-up rounds and those that follow: what a gate kept of one is not taken for the other's."""
    exchange = make_exchange(letters)
    for _ in range(2):
        plan = make_plan(3)
        letters.came[DRAFT_TAG].append(packet(3, [[1], [2]], [1, 1], [0, 0]))
        draft = expect(exchange, plan)
        exchange.conclude(plan, Decided(plan)).finish()
        assert draft.draft_lens.tolist() == [1, 1]
