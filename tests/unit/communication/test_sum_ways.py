"""Which way a sum goes, and how messages are divided over a peer's buffer: arithmetic, the same on all ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from parallel.transports.peer_all_reduce import ALIGNMENT, BLOCKS, MOST_RANKS, THREADS, Layout
from parallel.transports.sums import SumWays, Way

KIB = 1 << 10


def make_ways(calls: list[Way] | None = None) -> SumWays:
    """One shot up to 100 KiB, two shots and slices for any size."""
    heard = [] if calls is None else calls
    ways = (Way.ONE_SHOT, Way.TWO_SHOT, Way.SLICED)
    return SumWays({way: lambda _, way=way: heard.append(way) for way in ways}, {Way.ONE_SHOT: 100 * KIB})


def test_before_anything_is_timed_the_first_way_that_takes_a_message_is_used() -> None:
    ways = make_ways()
    assert ways.choose(1) is Way.ONE_SHOT
    assert ways.choose(100 * KIB) is Way.ONE_SHOT
    assert ways.choose(100 * KIB + 1) is Way.TWO_SHOT
    assert ways.candidates(100 * KIB) == [Way.ONE_SHOT, Way.TWO_SHOT, Way.SLICED]
    assert ways.candidates(200 * KIB) == [Way.TWO_SHOT, Way.SLICED]


def test_the_way_whose_slowest_rank_is_fastest_is_used() -> None:
    calls: list[Way] = []
    ways = make_ways(calls)
    first = {
        Way.ONE_SHOT: {8 * KIB: 3.0},
        Way.TWO_SHOT: {8 * KIB: 5.0, 256 * KIB: 9.0, 1024 * KIB: 40.0},
        Way.SLICED: {8 * KIB: 2.0, 256 * KIB: 10.0, 1024 * KIB: 30.0},
        Way.NCCL: {8 * KIB: 1.0, 256 * KIB: 1.0, 1024 * KIB: 1.0},  # not in the order of the ranks
    }
    second = {way: dict(times) for way, times in first.items()}
    second[Way.SLICED][8 * KIB] = 4.0
    timings = ways.decide([first, second])
    assert [(timing.nbytes, timing.way) for timing in timings] == [
        (8 * KIB, Way.ONE_SHOT), (256 * KIB, Way.TWO_SHOT), (1024 * KIB, Way.SLICED)
    ]  # fmt: skip
    assert timings[0].microseconds == {Way.ONE_SHOT: 3.0, Way.TWO_SHOT: 5.0, Way.SLICED: 4.0, Way.NCCL: 1.0}
    assert Way.ONE_SHOT not in timings[1].microseconds
    for nbytes, way in (
        (2, Way.ONE_SHOT),
        (8 * KIB, Way.ONE_SHOT),
        (8 * KIB + 2, Way.TWO_SHOT),
        (256 * KIB + 2, Way.SLICED),
        (1 << 30, Way.SLICED),
    ):
        assert ways.choose(nbytes) is way
        if nbytes < 1 << 20:
            ways.add(torch.zeros(nbytes // 2, dtype=torch.bfloat16))
            assert calls.pop() is way


@pytest.mark.parametrize("ranks", range(2, MOST_RANKS + 1))
def test_the_parts_of_a_buffer_do_not_overlap(ranks: int) -> None:
    layout = Layout.of(ranks)
    words = layout.definitions()
    rows = layout.peer_rows(0, [0] * ranks)
    parts = [
        (words["ONE_SHOT_CALLS"], 4 * BLOCKS),
        (words["TWO_SHOT_CALLS"], 4 * BLOCKS),
        (rows.calls, 4 * rows.rows),
        (words["FLAGS"], BLOCKS * 2 * 16 * 4),
        (words["ARRIVALS"], words["SLOTS"] * ranks * words["GROUPS"] * 16),
        (words["INBOX"], BLOCKS * ranks * words["CHUNK"]),
        (words["OUTBOX"], BLOCKS * ranks * words["CHUNK"]),
        (rows.own, rows.slots * ranks * rows.rows * rows.words * 8),
        (layout.nbytes, 0),
    ]
    assert all(start % 128 == 0 for start, _ in parts)
    assert all(start + length <= following for (start, length), (following, _) in pairwise(parts))
    assert layout.nbytes <= 17 << 20
    assert words["SLOTS"] == 4  # the kernel counts on it
    assert ranks <= 16  # flags of a block and phase


@pytest.mark.parametrize("ranks", range(2, MOST_RANKS + 1))
def test_every_byte_of_a_message_has_a_block_and_a_place(ranks: int) -> None:
    layout = Layout.of(ranks)
    assert layout.one_shot_bytes >= 64 << 10
    assert layout.one_shot_blocks(layout.one_shot_bytes) <= BLOCKS
    for nbytes in (2, 4, 4096, 4098, layout.one_shot_bytes):
        assert (
            (layout.one_shot_blocks(nbytes) - 1) * THREADS * 8 < nbytes <= layout.one_shot_blocks(nbytes) * THREADS * 8
        )
    for nbytes in (2, 30, 1024 * ranks, 8192, 100_002, 1 << 20, 5_000_006, 8 << 20, (8 << 20) + 2, 1 << 28):
        blocks, chunk = layout.two_shot_shape(nbytes)
        assert 1 <= blocks <= BLOCKS
        assert 0 < chunk <= layout.chunk
        assert chunk % ALIGNMENT == 0
        # As few turns as the buffer allows.
        assert -(-nbytes // (ranks * blocks * chunk)) == -(-nbytes // (ranks * blocks * layout.chunk))
