"""Rounds that the device has before their drafts are there: what is told to whom, and when, with a gate and messages of
the test's own. That a device waits is in test_device_gate.py, on a GPU."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from parallel.communicator import Communicator
from parallel.transports.device_gate import Question
from parallel.transports.solo import SoloCommunicator
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.roles.gated_drafts import GatedDrafts
from trtrun.roles.guess_tables import KnownVerdict, foreseen_rows
from trtrun.roles.message_exchange import MessageExchange
from trtrun.roles.round import Worker
from trtrun.speculation.ahead.policy import NEVER
from trtrun.speculation.drafter import Drafter
from trtrun.wire.packets import DRAFT_TAG, GUESS_TAG, VERDICT_TAG, decode_packet, encode_packet
from trtrun.wire.reports import ReportArrays, RoundTimes

DRAFT_RANK, TARGET_RANK, DRAFT_LEN = 1, 2, 3


class Letters:
    """A mailbox of the target rank: what came, and what was posted."""

    def __init__(self) -> None:
        self.came: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self.posted: list[tuple[int, int, int]] = []

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        self.posted.append((rank, tag, decode_packet(payload)[0]))

    def num_unsent_bytes(self) -> int:
        return 0

    def take(self, rank: int, tag: int) -> bytes | None:
        return self.came[tag].popleft() if self.came[tag] else None

    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        return self.take(rank, tag)

    def close(self) -> None:
        """Nothing is under way."""


class OpenGate:
    """A gate whose numbers are -1 until it is opened, as nothing waits on the host."""

    def __init__(self) -> None:
        self.waiting: dict[int, torch.Tensor] = {}
        self.questions: dict[int, Question] = {}
        self.tables: dict[int, list[list[int]]] = {}

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        assert opening not in self.waiting
        self.waiting[opening] = torch.full((count,), -1, dtype=torch.int64)
        return self.waiting[opening]

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        self.questions[opening] = question
        return self.enqueue(opening, len(question.rows) * (1 + question.width), most_seconds)

    def open(self, opening: int, numbers: np.ndarray) -> None:
        self.waiting[opening].copy_(torch.from_numpy(numbers))

    def send(self, opening: int, table: np.ndarray) -> None:
        assert opening in self.questions
        self.tables[opening] = table.tolist()


class Decided:
    """A round of the device with its verdict: each row gains a token."""

    may_be_followed = True

    def __init__(self, plan: RoundPlan) -> None:
        ones = np.ones(len(plan.sampled_rows), dtype=np.int64)
        self._report = ReportArrays(plan.round_index, RoundTimes(), ones, ones, ones[:, None])

    def is_done(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing waits."""

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        assert self._report.num_tokens is not None
        return self._report.num_tokens, self._report.tokens

    def finish(self) -> ReportArrays:
        return self._report


def make_plan(round_index: int, lens: tuple[int, ...] = (DRAFT_LEN, 2), **values: Any) -> RoundPlan:
    rows, nothing = np.arange(len(lens), dtype=np.int32), np.zeros((0, 3), dtype=np.int32)
    return RoundPlan(round_index, (), (), nothing, (), rows, np.array(lens, dtype=np.int32), rows, 100, **values)


def packet(round_index: int, tokens: list[list[int]], lens: list[int], foreseen: list[int]) -> bytes:
    width = len(tokens[0])
    rows = [[a, b, 0, width, 0, *of_row] for a, b, of_row in zip(lens, foreseen, tokens, strict=True)]
    return encode_packet(round_index, np.array(rows, dtype=np.int64))


@pytest.fixture
def letters() -> Letters:
    return Letters()


def make_exchange(letters: Letters, **values: Any) -> MessageExchange:
    group: Communicator = SoloCommunicator()
    return MessageExchange(
        mail=letters, rank=TARGET_RANK, draft_ranks=(DRAFT_RANK,), target_ranks=(TARGET_RANK,), peers=group,
        draft_peer=0, target_peer=1, group=group, target_vocab_size=100, use_logits=False,
        gated=GatedDrafts(OpenGate(), group, **values),
    )  # fmt: skip


def expect(exchange: MessageExchange, plan: RoundPlan) -> Draft:
    draft = exchange.hand_over(plan, None, ())
    assert draft is not None and draft.tokens.shape == (len(plan.decode_rows), plan.draft_len)
    return draft


def test_a_round_is_launched_before_the_verdict_that_its_draft_follows(letters: Letters) -> None:
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(5), make_plan(6, (0, 0))]
    letters.came[DRAFT_TAG].append(packet(4, [[11, 12, 13], [21, 22, 0]], [3, 2], [1, 0]))
    first = expect(exchange, plans[0])
    rounds = [exchange.conclude(plans[0], Decided(plans[0]))]
    second = expect(exchange, plans[1])
    rounds.append(exchange.conclude(plans[1], Decided(plans[1])))
    assert exchange.hand_over(plans[2], None, ()) is None  # nothing is drafted in it
    rounds.append(exchange.conclude(plans[2], Decided(plans[2])))
    assert letters.posted == [] and (first.tokens == -1).all()
    rounds[0].release()
    assert first.draft_lens.tolist() == [3, 2] and first.tokens.tolist() == [[11, 12, 13], [21, 22, 0]]
    assert letters.posted == [] and (second.tokens == -1).all()
    assert rounds[0].finish().foreseen.tolist() == [1, 0]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, 4)]
    # A packet that came too late for its round, and one that is narrower than what was asked for.
    letters.came[DRAFT_TAG] += [packet(4, [[9], [9]], [1, 1], [1, 1]), packet(5, [[31], [0]], [1, 0], [0, 1])]
    for one in rounds[1:]:
        one.release()
    assert second.draft_lens.tolist() == [1, 0] and second.tokens.tolist() == [[31, 0, 0], [0, 0, 0]]
    assert [one.finish().foreseen.tolist() for one in rounds] == [[1, 0], [0, 1], [0, 0]]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, index) for index in (4, 5, 6)]


def test_a_draft_that_does_not_come_is_none(letters: Letters) -> None:
    exchange, plan = make_exchange(letters), make_plan(0)
    draft = expect(exchange, plan)
    report = exchange.conclude(plan, Decided(plan)).finish()
    assert draft.draft_lens.tolist() == [0, 0] and report.foreseen.tolist() == [0, 0]
    assert letters.posted == [(DRAFT_RANK, VERDICT_TAG, 0)]


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
    assert [one.finish().foreseen.tolist() for one in (before, after)] == [[0, 0], [1, 1]]


class Drafted:
    """A drafter that drafts nothing, and keeps what it is told."""

    drafts_ahead = False

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def release_rows(self, plan: RoundPlan) -> None:
        """There are none."""

    begin_round = release_rows

    def guesses(self) -> np.ndarray | None:
        return None

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> None:
        return None

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        self.seen.append([] if verdict is None else verdict.tokens.flatten().tolist())


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
    """As rehearsed ones and those that follow: what a gate kept of one is not taken for the other's."""
    exchange = make_exchange(letters)
    for _ in range(2):
        plan = make_plan(3)
        letters.came[DRAFT_TAG].append(packet(3, [[1], [2]], [1, 1], [0, 0]))
        draft = expect(exchange, plan)
        exchange.conclude(plan, Decided(plan)).finish()
        assert draft.draft_lens.tolist() == [1, 1]


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
    ("redraft_from", "guesses", "foreseen"),
    [(1, [OTHER, FIRST, SECOND], [1, 1]), (1, [FIRST, OTHER], None), (2, [FIRST, OTHER], [1, 0]), (1, [], None)],
)
def test_a_round_whose_verdict_was_guessed_waits_for_no_packet(
    letters: Letters, redraft_from: int, guesses: list[list[int]], foreseen: list[int] | None, is_early: bool
) -> None:
    """The device has the guesses and the question as soon as both are there; packets are dropped, or waited for."""
    exchange = make_exchange(letters)
    plans = [make_plan(4), make_plan(5, redraft_from=redraft_from)]
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
    assert (question.width, question.fewest_missing) == (3, redraft_from)
    if guesses and not is_early:
        assert not gate.tables
        letters.came[GUESS_TAG].append(encode_packet(4, np.array(guesses, dtype=np.int64)))
        assert first.is_done()
    assert gate.tables == ({1: guesses} if guesses else {})
    first.finish()
    letters.came[DRAFT_TAG].append(packet(5, [[7], [8]], [1, 1], [0, 1]))
    second.release()
    assert second.finish().foreseen.tolist() == (foreseen or [0, 1])
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
    assert rounds[1].finish().foreseen.tolist() == [1, 1]


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
        return foreseen_rows(table, plan, before)

    def wait(
        rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        assert until is not None
        for guesses in ([FIRST], [FIRST, OTHER]):
            letters.came[GUESS_TAG].append(encode_packet(4, np.array(guesses, dtype=np.int64)))
            assert not any([until() for _ in range(5)])
        return packet(5, [[7], [8]], [1, 1], [0, 1])

    monkeypatch.setattr("trtrun.roles.gated_drafts.foreseen_rows", look)
    letters.wait = wait  # type: ignore[method-assign]
    assert rounds[1].finish().foreseen.tolist() == [0, 1] and looks == [1, 2]


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
        ({"given_rows": (0,)}, {}),
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
    assert rounds[1].finish().foreseen.tolist() == [0, 1]
    assert not gate.questions and gate.waiting[1].view(2, 4)[:, 1].tolist() == [7, 8]


def test_guesses_of_an_earlier_verdict_are_not_looked_at(letters: Letters) -> None:
    """As behind a round in which nothing was sampled, or whose guesses are lost."""
    exchange, plans = make_exchange(letters), [make_plan(4), make_plan(6)]
    letters.came[DRAFT_TAG] += [packet(4, [[1], [1]], [1, 1], [0, 0]), packet(6, [[7], [8]], [1, 1], [0, 1])]
    letters.came[GUESS_TAG].append(encode_packet(4, np.array([FIRST, SECOND], dtype=np.int64)))
    rounds = [launch(exchange, plan) for plan in plans]
    rounds[0].finish()
    assert rounds[1].finish().foreseen.tolist() == [0, 1]


class Foreseeing(Drafted):
    """A drafter that has told guesses, and what it is asked to propose."""

    drafts_ahead = True

    def __init__(self, table: np.ndarray | None) -> None:
        super().__init__()
        self.table = table
        self.asked: list[int] = []

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> None:
        self.asked.append(plan.redraft_from)

    def anticipate(self, plan: RoundPlan, *, guesses: bool) -> int:
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
