"""Which guides ranks are told to build, and when they may forget them."""

from __future__ import annotations

from trtrun.core.guide import Guide, GuideStart
from trtrun.scheduling.guide_books import MOST_AHEAD, MOST_ORDERED, GuideBooks, GuideOrders

ALL = [GuideStart(Guide("regex", str(number))) for number in range(MOST_AHEAD + MOST_ORDERED)]
A, B = ALL[:2]


def books_of(*guides: GuideStart) -> GuideBooks:
    books = GuideBooks()
    for guide in guides:
        assert not books.add(guide)
    return books


def test_a_guide_is_ordered_once_and_stays_until_its_last_completion_ends() -> None:
    books = books_of(A, A)
    assert books.take_orders(lambda: [A, A]) == GuideOrders((), (A,)) and books.has_news
    assert not books.take_orders(lambda: [A, A])
    assert not books.add(A) and books.note_built(A) and not books.note_built(A)
    assert books.add(A) and not books.has_news
    for _ in range(3):
        books.remove(A)
    assert not books.has_news
    books.remove(A)
    assert books.has_news and books.take_orders(lambda: []) == GuideOrders((A,), ()) and not books.has_news


def test_one_that_is_over_before_it_is_built_is_told_and_ordered_anew() -> None:
    books = books_of(A, B)
    books.take_orders(lambda: [A])
    books.remove(A)
    books.remove(B)
    assert not books.note_built(A)
    assert not books.add(A)
    assert books.take_orders(lambda: [A]) == GuideOrders((A,), (A,)), "B was never ordered"


def test_few_are_built_at_a_time_and_few_wait_for_rows() -> None:
    books = books_of(*ALL)
    wanted = iter(ALL)
    assert books.take_orders(lambda: wanted).begun == tuple(ALL[:MOST_ORDERED])
    assert next(wanted) == ALL[MOST_ORDERED], "no more is read than there is room for"
    assert not books.take_orders(lambda: ALL)
    for guide in ALL[: MOST_AHEAD - MOST_ORDERED]:
        books.note_built(guide)
    assert books.take_orders(lambda: ALL[MOST_ORDERED:]).begun == tuple(ALL[MOST_ORDERED:MOST_AHEAD])
    for guide in ALL[:MOST_AHEAD]:
        books.note_built(guide)
    assert not books.take_orders(lambda: ALL[MOST_AHEAD:]), "all that are built wait for rows"
    books.note_row(ALL[0])
    assert books.take_orders(lambda: ALL[MOST_AHEAD:]).begun == (ALL[MOST_AHEAD],)


def test_all_are_over_at_once() -> None:
    books = books_of(A, A, B)
    books.take_orders(lambda: [A])
    books.note_built(A)
    books.remove_all()
    assert books.take_orders(lambda: [B]) == GuideOrders((A,), ()) and not books.has_news
