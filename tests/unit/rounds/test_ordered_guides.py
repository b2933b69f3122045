"""Orders of guides, from the orchestrator to ranks: who has answered, what is taken back, ranks that are lost."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from trtrun.core.guide import Guide, GuideStart
from trtrun.guiding.row_guides import RowGuides
from trtrun.rounds.prepared_work import GuideDesk, OrderedGuides
from trtrun.scheduling.guide_registry import GuideOrders
from trtrun.wire.messages import GuideMessage, decode_guide_orders, encode_guide_orders

A, B = GuideStart(Guide("regex", "a")), GuideStart(Guide("json", '{"enum":["ü\\n"]}'), (3, 1))
NOBODY: frozenset[int] = frozenset()


class Builder:
    """Of a rank's guides, those that are begun and those that are done."""

    def __init__(self) -> None:
        self.begun: dict[GuideStart, Future[None]] = {}

    def build(self, guide: GuideStart) -> None:
        self.begun[guide] = Future()

    def forget(self, guide: GuideStart) -> None:
        del self.begun[guide]

    def is_built(self, guide: GuideStart) -> bool:
        return self.begun[guide].done()


@pytest.fixture
def builder() -> Builder:
    return Builder()


def desk_of(builder: Builder | None) -> GuideDesk:
    guides: RowGuides | None = builder  # type: ignore[assignment]
    return GuideDesk(guides)


def send(desk: GuideDesk, payload: bytes) -> None:
    message = decode_guide_orders(payload)
    assert message is not None
    desk.take(message)


def answer(desk: GuideDesk, rank: int, ordered: OrderedGuides) -> None:
    for payload in desk.take_answers():
        ordered.note(rank, payload)


def test_messages_arrive_as_they_were_sent() -> None:
    message = GuideMessage([3, 1], {7: A, 8: B})
    assert decode_guide_orders(encode_guide_orders(message)) == message
    assert decode_guide_orders(bytes(8)) is None, "a plan"


def test_a_guide_is_built_once_all_ranks_say_so(builder: Builder) -> None:
    ordered, slow, quick = OrderedGuides(), desk_of(builder), desk_of(None)
    for desk in (slow, quick):
        assert not desk.is_waiting
    payload = ordered.encode(GuideOrders((), (A, B)))
    for rank, desk in enumerate((slow, quick), 1):
        send(desk, payload)
        answer(desk, rank, ordered)
    assert ordered.take_built(2, NOBODY) == [] and slow.is_waiting and not slow.has_answer() and not quick.is_waiting
    builder.begun[B].set_result(None)
    assert slow.has_answer()
    answer(slow, 1, ordered)
    assert not slow.has_answer()
    assert ordered.take_built(2, NOBODY) == [B] and ordered.take_built(2, NOBODY) == []


def test_ranks_that_are_lost_are_not_waited_for() -> None:
    ordered, desk = OrderedGuides(), desk_of(None)
    send(desk, ordered.encode(GuideOrders((), (A,))))
    answer(desk, 2, ordered)
    assert ordered.take_built(2, NOBODY) == [] and ordered.take_built(1, frozenset({2})) == []
    assert ordered.take_built(1, frozenset({1})) == [A]


def test_an_answer_to_what_was_taken_back_is_none_to_what_was_ordered_later(builder: Builder) -> None:
    ordered, desk = OrderedGuides(), desk_of(builder)
    send(desk, ordered.encode(GuideOrders((), (A,))))
    builder.begun[A].set_result(None)
    (late,) = desk.take_answers()
    send(desk, ordered.encode(GuideOrders((A,), (A,))))
    ordered.note(1, late)
    assert ordered.take_built(1, NOBODY) == [] and desk.is_waiting and not desk.has_answer()
    send(desk, ordered.encode(GuideOrders((A,), ())))
    assert not builder.begun and not desk.is_waiting
