"""Shard arithmetic: the ranks' shares cover everything once, and each rank's KV heads serve its query heads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import ShardingError
from parallel.sharding import (
    column_range,
    expert_range,
    kv_heads_for_rank,
    loaded_vocabulary_range,
    query_heads_for_rank,
    vocabulary_range,
)

worlds = st.integers(1, 8)


def share_heads(heads: int, kv_heads: int, world: int) -> None:
    query_heads_for_rank(heads, 0, world)
    kv_heads_for_rank(kv_heads, 0, world)


@given(share=st.integers(1, 50), world=worlds)
@pytest.mark.parametrize("cut", [column_range, query_heads_for_rank])
def test_equal_shares_cover_all_once_and_in_order(cut, share: int, world: int) -> None:
    parts = [cut(share * world, rank, world) for rank in range(world)]
    assert [index for part in parts for index in part] == list(range(share * world))
    assert {len(part) for part in parts} == {share}


@pytest.mark.parametrize(("size", "rank", "world"), [(7, 0, 2), (0, 0, 1), (8, 2, 2), (8, -1, 2), (8, 0, 0)])
def test_shares_that_do_not_come_out_even_are_refused(size: int, rank: int, world: int) -> None:
    with pytest.raises(ShardingError):
        column_range(size, rank, world)


@given(size=st.integers(8, 300), world=worlds)
def test_experts_are_shared_out_nearly_evenly(size: int, world: int) -> None:
    parts = [expert_range(size, rank, world) for rank in range(world)]
    assert [expert for part in parts for expert in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(size=st.integers(1, 300), world=worlds)
def test_a_padded_vocabulary_is_the_smallest_that_divides(size: int, world: int) -> None:
    parts = [vocabulary_range(size, rank, world) for rank in range(world)]
    assert [token for part in parts for token in part] == list(range(sum(map(len, parts))))
    assert 0 <= sum(map(len, parts)) - size < world
    assert len({len(part) for part in parts}) == 1
    loaded = [loaded_vocabulary_range(size, rank, world) for rank in range(world)]
    assert [token for part in loaded for token in part] == list(range(size))
    assert all(set(few) <= set(all_) for few, all_ in zip(loaded, parts, strict=True))


def test_a_vocabulary_smaller_than_the_group_leaves_the_last_ranks_nothing_to_load() -> None:
    assert [len(loaded_vocabulary_range(2, rank, 4)) for rank in range(4)] == [1, 1, 0, 0]


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), world=worlds)
def test_each_rank_holds_the_kv_heads_that_its_query_heads_read(kv_heads: int, group: int, world: int) -> None:
    heads = kv_heads * group
    fits = heads % world == 0 and (kv_heads % world == 0 or world % kv_heads == 0)
    if not fits:
        with pytest.raises(ShardingError):
            share_heads(heads, kv_heads, world)
        return
    for rank in range(world):
        read = {head // group for head in query_heads_for_rank(heads, rank, world)}
        held = kv_heads_for_rank(kv_heads, rank, world)
        assert read == set(held)
        assert len(held) == max(1, kv_heads // world)


def test_fewer_kv_heads_than_ranks_are_held_more_than_once() -> None:
    assert [list(kv_heads_for_rank(2, rank, 4)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(12, 3, 2), (6, 2, 4), (8, 0, 1)])
def test_heads_that_cannot_be_shared_out_are_refused_with_the_numbers(heads: int, kv_heads: int, world: int) -> None:
    with pytest.raises(ShardingError, match=str(kv_heads) if heads % world == 0 else str(heads)):
        share_heads(heads, kv_heads, world)
