"""The mailbox between real ranks: order, sizes, looking without waiting, and waits that end without a message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from mpi4py import MPI

from parallel.mailbox import MpiMailbox

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = [0, 8, 100, 5_000, 300_000, 0, 7_000_000, 3]
TAGS = (1, 2, 7)


def payload(size: int, *salt: int) -> bytes:
    return hashlib.shake_128(f"{size} {salt}".encode()).digest(size)


@pytest.fixture
def mail(world: MPI.Intracomm) -> Iterator[MpiMailbox]:
    mailbox = MpiMailbox(world.Dup())
    yield mailbox
    mailbox.close()


def others(world: MPI.Intracomm) -> list[int]:
    return [rank for rank in range(world.size) if rank != world.rank]


def test_messages_of_any_size_keep_their_order_by_sender_and_tag(world: MPI.Intracomm, mail: MpiMailbox) -> None:
    """All ranks send to all at once, and read by tag and sender in another order than things were sent in."""
    for index, size in enumerate(SIZES):
        for tag in TAGS:
            for rank in others(world):
                mail.post(rank, tag, payload(size, index, tag, world.rank, rank))
    for tag in reversed(TAGS):
        for rank in reversed(others(world)):
            for index, size in enumerate(SIZES):
                assert mail.wait(rank, tag) == payload(size, index, tag, rank, world.rank)
            assert mail.take(rank, tag) is None


def test_a_message_is_taken_once_it_is_there_and_never_waited_for(world: MPI.Intracomm, mail: MpiMailbox) -> None:
    for rank in others(world):
        assert mail.take(rank, 1) is None
    world.Barrier()
    for rank in others(world):
        mail.post(rank, 1, b"first")
        mail.post(rank, 1, b"second")
        mail.post(rank, 2, b"go")
    for rank in others(world):
        assert mail.wait(rank, 2) == b"go"
        found: list[bytes] = []
        while len(found) < 2:  # a look each, however long they take
            if (message := mail.take(rank, 1)) is not None:
                found.append(message)
        assert found == [b"first", b"second"]
        assert mail.take(rank, 1) is None


def test_waits_end_at_their_time_and_lose_nothing(world: MPI.Intracomm, mail: MpiMailbox) -> None:
    if world.rank == 0:
        for rank in others(world):
            assert mail.wait(rank, 1, timeout=0.01) is None
            assert mail.wait(rank, 1, timeout=0.0) is None
    world.Barrier()
    if world.rank != 0:
        mail.post(0, 1, b"late")
        return
    for rank in others(world):
        assert mail.wait(rank, 2, timeout=0.0) is None, "another tag"
        assert mail.wait(rank, 1) == b"late"


def test_a_wait_ends_when_it_is_told_to(world: MPI.Intracomm, mail: MpiMailbox) -> None:
    asked: list[int] = []

    def until() -> bool:
        asked.append(1)
        return len(asked) > 20

    assert mail.wait(others(world)[0], 5, until=until) is None
    assert len(asked) == 21
    assert mail.wait(others(world)[0], 5, until=lambda: True) is None
    world.Barrier()
    for rank in others(world):
        mail.post(rank, 5, b"here")
    for rank in others(world):
        assert mail.wait(rank, 5, until=lambda: False) == b"here"


def test_a_message_that_is_there_wins_over_until_and_over_no_time(world: MPI.Intracomm, mail: MpiMailbox) -> None:
    neighbour, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    mail.post(neighbour, 3, b"a")
    mail.post(neighbour, 3, b"b")
    mail.post(neighbour, 4, b"")
    assert mail.wait(before, 4) == b"", "behind the others, under another tag"
    assert mail.wait(before, 3) == b"a"
    while (found := mail.wait(before, 3, timeout=0.0, until=lambda: True)) is None:
        pass
    assert found == b"b"


def test_closing_waits_until_all_is_sent(world: MPI.Intracomm) -> None:
    """What is too large to be sent at once still arrives, though the sender closes right behind it."""
    mail = MpiMailbox(world.Dup())
    if world.rank == 0:
        for rank in others(world):
            mail.post(rank, 1, payload(7_000_000, rank))
    else:
        assert mail.wait(0, 1) == payload(7_000_000, world.rank)
    mail.close()
    assert mail.num_unsent_bytes() == 0


def test_closing_does_not_wait_for_somebody_to_take_what_came_too_late(world: MPI.Intracomm) -> None:
    """As the drafts for a round that is over; the ranks that are told so may close before anything is posted."""
    mail, size = MpiMailbox(world.Dup()), 7_000_000
    first = MpiMailbox(world.Dup(), ranks=(0, world.size - 1))
    if world.rank:
        for tag in TAGS:
            mail.post(0, tag, payload(size, tag))
    if world.rank in (0, world.size - 1):  # no other rank has a part in it
        if world.rank:
            first.post(0, 1, payload(size))
        first.close()
    mail.close()
    assert mail.num_unsent_bytes() == 0


def test_a_rank_that_posts_nothing_waits_for_nobody_and_is_waited_for_by_nobody(world: MPI.Intracomm) -> None:
    box = MpiMailbox(world.Dup(), ranks=range(1, world.size))
    if world.rank and world.size > 2:
        box.post(world.rank % (world.size - 1) + 1, 1, bytes(100_000))
    box.close()
    assert box.num_unsent_bytes() == 0
