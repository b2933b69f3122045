"""Guesses that a draft rank has told: a target whose verdict is among them goes on without a packet, and the draft rank
keeps to them. What the device does is in test_device_gate.py, on a GPU; whole jobs are in test_gated_jobs.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from open_gates import (
    DRAFT_RANK,
    TARGET_RANK,
    Decided,
    Drafted,
    Letters,
    OpenGate,
    expect,
    make_exchange,
    make_plan,
    packet,
)

from parallel.transports.solo import SoloCommunicator
from trtrun.core.nouns import RoundPlan, Verdict
from trtrun.rounds.exchange.gated_drafts import GatedDrafts, KnownVerdict, find_cache_hits
from trtrun.rounds.exchange.message_exchange import MessageExchange
from trtrun.rounds.round import Worker
from trtrun.speculation.ahead.policy import NEVER
from trtrun.speculation.drafter import Drafter
from trtrun.wire.messages import DRAFT_TAG, GUESS_TAG, VERDICT_TAG, encode_packet


@pytest.fixture
def letters() -> Letters:
    return Letters()


def launch(exchange: MessageExchange, plan: RoundPlan) -> Any:
    """A round as a target leader launches it, each of whose rows gains token 1."""
    if plan.draft_len:
        expect(exchange, plan)
    ones = torch.ones(len(plan.decode_rows), dtype=torch.int64)
    exchange.send_verdict(plan, Verdict(ones, ones.unsqueeze(1)))
    return exchange.conclude(plan, Decided(plan))


FIRST, SECOND, OTHER = [0, 0, 1, 41, 42], [1, 0, 1, 51, 52], [1, 0, 2, 61, 62]
"""Guesses: row 0 and row 1 gain token 1 alone, which comes true; row 1 gains token 2."""


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    ("redraft_threshold", "guesses", "foreseen"),
    [(1, [OTHER, FIRST, SECOND], [1, 1]), (1, [FIRST, OTHER], None), (2, [FIRST, OTHER], [1, 0]), (1, [], None)],
)
def test_a_round_whose_verdict_was_guessed_waits_for_no_packet(
    letters: Letters, redraft_threshold: int, guesses: list[list[int]], foreseen: list[int] | None, is_early: bool
) -> None:
    """The device has the guesses and the question as soon as both are there; packets are dropped, or waited for."""
    exchange = make_exchange(letters)
    plans = [make_plan(4), make_plan(5, redraft_threshold=redraft_threshold)]
    gate = cast(OpenGate, cast(GatedDrafts, exchange.gated).gate)
    letters.came[DRAFT_TAG].append(packet(4, [[1], [1]], [1, 1], [0, 0]))
    first = launch(exchange, plans[0])
    assert 0 not in gate.questions, "there is no verdict before the first round"
    if guesses and is_early:
        letters.came[GUESS_TAG].append(encode_packet(4, np.array(guesses, dtype=np.int64)))
        assert first.is_done()
    second = launch(exchange, plans[1])
    question = gate.questions[1]
    assert question.rows.tolist() == [[0, 3, 0], [1, 2, 1]] and question.counts.tolist() == [1, 1]
    assert question.lines.tolist() == [[1], [1]]
    assert (question.width, question.fewest_missing) == (3, redraft_threshold)
    if guesses and not is_early:
        assert not gate.tables
        letters.came[GUESS_TAG].append(encode_packet(4, np.array(guesses, dtype=np.int64)))
        assert first.is_done()
    assert gate.tables == ({1: guesses} if guesses else {})
    first.finish()
    letters.came[DRAFT_TAG].append(packet(5, [[7], [8]], [1, 1], [0, 1]))
    second.release()
    assert second.finish().cache_hits.tolist() == (foreseen or [0, 1])
    assert not letters.came[DRAFT_TAG], "nobody takes it later"
    assert bool((gate.waiting[1] == -1).all()) == (foreseen is not None)
    assert not exchange.gated._guesses and not exchange.gated._due  # type: ignore[union-attr]


def test_guesses_that_come_while_the_packet_is_waited_for_end_the_wait(letters: Letters) -> None:
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(5)]
    letters.came[DRAFT_TAG].append(packet(4, [[1], [1]], [1, 1], [0, 0]))
    rounds = [launch(exchange, plan) for plan in plans]
    rounds[0].finish()

    def come(
        rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        assert until is not None and not until()
        letters.came[GUESS_TAG].append(encode_packet(4, np.array([FIRST, SECOND], dtype=np.int64)))
        assert until()
        return None

    letters.wait = come  # type: ignore[method-assign]
    assert rounds[1].finish().cache_hits.tolist() == [1, 1]


def test_guesses_are_looked_at_once_however_long_the_packet_is_waited_for(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes as long as a message: the packet that ends the wait would be found late."""
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(5)]
    letters.came[DRAFT_TAG].append(packet(4, [[1], [1]], [1, 1], [0, 0]))
    rounds = [launch(exchange, plan) for plan in plans]
    rounds[0].finish()
    looks: list[int] = []

    def look(table: np.ndarray, plan: RoundPlan, before: KnownVerdict) -> tuple[int, ...] | None:
        looks.append(len(table))
        return find_cache_hits(table, plan, before)

    def wait(
        rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        assert until is not None
        for guesses in ([FIRST], [FIRST, OTHER]):
            letters.came[GUESS_TAG].append(encode_packet(4, np.array(guesses, dtype=np.int64)))
            assert not any([until() for _ in range(5)])
        return packet(5, [[7], [8]], [1, 1], [0, 1])

    monkeypatch.setattr("trtrun.rounds.exchange.gated_drafts.find_cache_hits", look)
    letters.wait = wait  # type: ignore[method-assign]
    assert rounds[1].finish().cache_hits.tolist() == [0, 1] and looks == [1, 2]


def test_guesses_before_rounds_without_drafts_are_not_kept(letters: Letters) -> None:
    """As those behind prompts, where it pays to draft nothing, or every completion has one token."""
    exchange = make_exchange(letters)
    for index in range(4):
        launched = launch(exchange, make_plan(index, (0, 0)))
        letters.came[GUESS_TAG].append(encode_packet(index, np.array([FIRST], dtype=np.int64)))
        assert launched.is_done()
        launched.finish()
        assert len(exchange.gated._guesses) == 1, "of the next round alone"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"predicted_output_rows": (0,)}, {}),
        ({}, {"needs_draft": lambda plan: plan.round_index == 5}),
    ],
    ids=["drafts of requests", "guided rows"],
)
def test_drafts_that_are_not_what_was_guessed_are_waited_for(
    letters: Letters, values: dict[str, Any], settings: dict[str, Any]
) -> None:
    exchange, plans = make_exchange(letters, **settings), [make_plan(4), make_plan(5, **values)]
    gate = cast(OpenGate, cast(GatedDrafts, exchange.gated).gate)
    letters.came[DRAFT_TAG] += [packet(4, [[1], [1]], [1, 1], [0, 0]), packet(5, [[7], [8]], [1, 1], [0, 1])]
    letters.came[GUESS_TAG].append(encode_packet(4, np.array([FIRST, SECOND], dtype=np.int64)))
    rounds = [launch(exchange, plan) for plan in plans]
    rounds[0].finish()
    assert rounds[1].finish().cache_hits.tolist() == [0, 1]
    assert not gate.questions and gate.waiting[1].view(2, 4)[:, 1].tolist() == [7, 8]


def test_guesses_of_an_earlier_verdict_are_not_looked_at(letters: Letters) -> None:
    """As behind a round in which nothing was sampled, or whose guesses are lost."""
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(6)]
    letters.came[DRAFT_TAG] += [packet(4, [[1], [1]], [1, 1], [0, 0]), packet(6, [[7], [8]], [1, 1], [0, 1])]
    letters.came[GUESS_TAG].append(encode_packet(4, np.array([FIRST, SECOND], dtype=np.int64)))
    rounds = [launch(exchange, plan) for plan in plans]
    rounds[0].finish()
    assert rounds[1].finish().cache_hits.tolist() == [0, 1]


class Foreseeing(Drafted):
    """A drafter that has told guesses, and what it is asked to propose."""

    drafts_ahead = True

    def __init__(self, table: np.ndarray | None) -> None:
        super().__init__()
        self.table = table
        self.asked: list[int] = []

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> None:
        self.asked.append(plan.redraft_threshold)

    def draft_ahead(self, plan: RoundPlan, *, guesses: bool) -> int:
        return int(guesses)

    def guesses(self) -> np.ndarray | None:
        return self.table

    def hit_chances(self) -> list[float]:
        return []


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_draft_rank_tells_its_guesses_and_keeps_to_them_where_it_is_late(
    letters: Letters, tells: bool, is_late: bool
) -> None:
    exchange = MessageExchange(
        mail=letters, rank=DRAFT_RANK, draft_ranks=(DRAFT_RANK,), target_ranks=(TARGET_RANK,),
        peers=SoloCommunicator(), draft_peer=0, target_peer=1, group=None, target_vocab_size=100, use_logits=False,
        tells_guesses=tells,
    )  # fmt: skip
    if is_late:
        letters.came[VERDICT_TAG].append(encode_packet(3, np.array([[1, 42]], dtype=np.int64)))
    for table in (None, np.array([FIRST])):
        letters.posted.clear()
        drafter = Foreseeing(table)
        worker = Worker(exchange, cast(Drafter, drafter), None, leads_draft=True, leads_target=False, use_logits=False)
        worker.launch_round(make_plan(3, (1,)))
        # Late, it drafts nothing anew, and makes what the target may have found its own.
        assert drafter.asked == ([1] if not is_late else [NEVER] if table is not None else [])
        told = [(rank, tag) for rank, tag, _ in letters.posted]
        assert told == ([(TARGET_RANK, GUESS_TAG)] if tells and table is not None else [])
        if is_late:
            letters.came[VERDICT_TAG].append(encode_packet(3, np.array([[1, 42]], dtype=np.int64)))
            exchange._late_round = (-1, False)
