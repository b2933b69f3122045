"""Which guides ranks are told to build, and when they may forget them."""

from __future__ import annotations

from trtrun.core.guide import Guide, GuideStart
from trtrun.scheduling.guide_registry import MOST_AHEAD, MOST_ORDERED, GuideOrders, GuideRegistry

ALL = [GuideStart(Guide("regex", str(number))) for number in range(MOST_AHEAD + MOST_ORDERED)]
A, B = ALL[:2]


def registry_of(*guides: GuideStart) -> GuideRegistry:
    registry = GuideRegistry()
    for guide in guides:
        assert not registry.add(guide)
    return registry


def test_a_guide_is_ordered_once_and_stays_until_its_last_completion_ends() -> None:
    registry = registry_of(A, A)
    assert registry.take_orders(lambda: [A, A]) == GuideOrders((), (A,)) and registry.has_news
    assert not registry.take_orders(lambda: [A, A])
    assert not registry.add(A) and registry.note_built(A) and not registry.note_built(A)
    assert registry.add(A) and not registry.has_news
    for _ in range(3):
        registry.remove(A)
    assert not registry.has_news
    registry.remove(A)
    assert registry.has_news and registry.take_orders(lambda: []) == GuideOrders((A,), ()) and not registry.has_news


def test_one_that_is_over_before_it_is_built_is_told_and_ordered_anew() -> None:
    registry = registry_of(A, B)
    registry.take_orders(lambda: [A])
    registry.remove(A)
    registry.remove(B)
    assert not registry.note_built(A)
    assert not registry.add(A)
    assert registry.take_orders(lambda: [A]) == GuideOrders((A,), (A,)), "B was never ordered"


def test_few_are_built_at_a_time_and_few_wait_for_rows() -> None:
    registry = registry_of(*ALL)
    wanted = iter(ALL)
    assert registry.take_orders(lambda: wanted).begun == tuple(ALL[:MOST_ORDERED])
    assert next(wanted) == ALL[MOST_ORDERED], "no more is read than there is room for"
    assert not registry.take_orders(lambda: ALL)
    for guide in ALL[: MOST_AHEAD - MOST_ORDERED]:
        registry.note_built(guide)
    assert registry.take_orders(lambda: ALL[MOST_ORDERED:]).begun == tuple(ALL[MOST_ORDERED:MOST_AHEAD])
    for guide in ALL[:MOST_AHEAD]:
        registry.note_built(guide)
    assert not registry.take_orders(lambda: ALL[MOST_AHEAD:]), "all that are built wait for rows"
    registry.note_row(ALL[0])
    assert registry.take_orders(lambda: ALL[MOST_AHEAD:]).begun == (ALL[MOST_AHEAD],)


def test_all_are_over_at_once() -> None:
    registry = registry_of(A, A, B)
    registry.take_orders(lambda: [A])
    registry.note_built(A)
    registry.remove_all()
    assert registry.take_orders(lambda: [B]) == GuideOrders((A,), ()) and not registry.has_news
