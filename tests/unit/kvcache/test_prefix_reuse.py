"""Reuse of blocks: digests of chains, the cache, one row's table, and what a second request gets."""

from __future__ import annotations

import pytest
from scheduler_simulation import Job, make_request

from trtrun.kvcache.block_table import BlockTable
from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix_cache import PrefixCache, extend_digests
from trtrun.kvcache.state_snapshots import StateSnapshots
from trtrun.scheduling.scheduler import SchedulerLimits


def digests_of(tokens: list[int], block_size: int = 2) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, tokens, block_size, len(tokens) // block_size)
    return digests


def make_table(num_blocks: int = 10, enabled: bool = True) -> tuple[BlockPool, PrefixCache, BlockTable]:
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, enabled)
    return pool, cache, BlockTable(pool, cache, 2)


def test_digest_names_the_whole_chain() -> None:
    first, second = digests_of([1, 2, 3, 4]), digests_of([9, 2, 3, 4])
    assert first[1] != second[1], "equal blocks behind different parents are different"
    assert digests_of([1, 2, 3, 4, 5]) == first, "a block that is not full has no digest"
    assert digests_of([1, 2, 1, 2])[0] != digests_of([1, 2, 1, 2])[1]
    assert digests_of([1, 256])[0] != digests_of([257, 0])[0]
    grown = digests_of([1, 2])
    extend_digests(grown, [1, 2, 3, 4], 2, 2)
    assert grown == first


def test_a_block_that_depends_on_the_token_behind_it_is_found_by_that_too() -> None:
    pool = BlockPool(10)
    cache = PrefixCache(pool)
    table = BlockTable(pool, cache, 2, num_behind=1)
    table.reserve(5)
    table.commit([1, 2, 3, 4, 5], 4)
    assert len(cache) == 2
    for tokens, found in (
        ([1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4, 6, 7], 1),
        ([1, 2, 3, 4], 1),
        ([1, 2, 4], 0),
        ([1, 2], 0),
    ):
        assert BlockTable(pool, cache, 2, num_behind=1).match_prefix(tokens) == table.blocks[:found]
    grown = BlockTable(pool, cache, 2, num_behind=1)
    assert grown.match_prefix([1, 2, 3]) == table.blocks[:1], "digests grow with the tokens"
    assert grown.match_prefix([1, 2, 3, 4, 5]) == table.blocks[:2]
    assert BlockTable(pool, cache, 2).match_prefix([1, 2, 3, 4, 5]) == []


def test_table_reuses_the_longest_chain_but_never_the_last_token() -> None:
    pool, cache, table = make_table()
    tokens = [1, 2, 3, 4, 5, 6]
    table.reserve(6)
    table.commit(tokens, 6)
    other = BlockTable(pool, cache, 2)
    assert other.match_prefix(tokens) == table.blocks[:2], "the last token's block has to be computed"
    assert BlockTable(pool, cache, 2).match_prefix([*tokens, 7]) == table.blocks
    assert BlockTable(pool, cache, 2).match_prefix([1, 2, 9, 9, 5, 6, 7]) == table.blocks[:1]
    assert BlockTable(pool, cache, 2).match_prefix([2, 1, 3, 4, 5]) == []
    other.adopt(table.blocks[:2])
    assert [pool.references(block) for block in table.blocks] == [2, 2, 1]
    assert other.reserve(6) == 2 and other.blocks[2] not in table.blocks
    table.release()
    other.release()
    assert pool.leaks() == [] and pool.num_evictable == 3


def test_table_commits_full_blocks_only_and_once() -> None:
    _, cache, table = make_table()
    table.reserve(6)
    table.commit([1, 2, 3, 4, 5], 3)
    assert cache.blocks == {table.blocks[0]}
    table.commit([1, 2, 3, 4, 5], 1)
    assert table.num_committed_blocks == 1
    table.commit([1, 2, 3, 4, 5], 4)
    assert cache.blocks == set(table.blocks[:2])


def test_two_rows_with_equal_tokens_keep_one_cached_block() -> None:
    pool, cache, table = make_table()
    twin = BlockTable(pool, cache, 2)
    for item in (table, twin):
        item.reserve(2)
        item.commit([1, 2], 2)
    assert cache.blocks == set(table.blocks)
    twin.release()
    assert pool.num_evictable == 0 and len(cache) == 1


def test_eviction_takes_the_ends_of_chains_first_and_forgets_them() -> None:
    pool, cache, table = make_table(num_blocks=5)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    table.reserve(6)
    table.commit(tokens, 6)
    blocks = list(table.blocks)
    table.release()
    taken = pool.allocate(2)  # the one free block, then the least recently released
    assert taken[1] == blocks[2]
    assert table.match_prefix(tokens) == blocks[:2]
    pool.allocate(2)
    assert table.match_prefix(tokens) == [] and len(cache) == 0


def test_clear_frees_evictable_blocks_and_unmarks_held_ones() -> None:
    pool, cache, table = make_table()
    held = BlockTable(pool, cache, 2)
    for item, tokens in ((table, [1, 2]), (held, [3, 4])):
        item.reserve(2)
        item.commit(tokens, 2)
    table.release()
    cache.clear()
    assert pool.num_evictable == 0 and len(cache) == 0
    held.release()
    assert pool.num_free == 9 and pool.leaks() == []


def test_disabled_cache_registers_and_finds_nothing() -> None:
    pool, cache, table = make_table(enabled=False)
    table.reserve(4)
    table.commit([1, 2, 3, 4], 4)
    assert len(cache) == 0 and table.match_prefix([1, 2, 3, 4, 5]) == []
    table.release()
    assert pool.num_evictable == 0


def test_a_table_in_use_adopts_nothing() -> None:
    _, _, table = make_table()
    table.reserve(1)
    with pytest.raises(RuntimeError, match="holds 1 blocks"):
        table.adopt([])


@pytest.mark.parametrize("draft_max_seq_len", [None, 64])
def test_second_request_computes_only_what_is_new(draft_max_seq_len: int | None) -> None:
    job = Job(SchedulerLimits(2, 64, 64, draft_max_seq_len, 2, 4, 40))
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    job.add(make_request(0, prompt, 3))
    job.run([])
    second = job.add(make_request(1, [*prompt, 4, 4], 3))
    plan = job.step()
    assert plan is not None
    assert plan.admissions[0].num_cached_tokens == 8 == second.statistics.num_cached_prompt_tokens
    assert [(chunk.start, chunk.length) for chunk in plan.prefill] == [(8, 4)]
    assert [index for _, index, _ in plan.block_updates.tolist()] == [0, 1, 2], "the whole table is sent"
    job.run([])


def test_chunks_are_shared_as_soon_as_their_round_is_committed() -> None:
    job = Job(SchedulerLimits(2, 4, 64, 64, 2, 2, 40))
    job.add(make_request(0, [1, 2, 3, 4, 5, 6, 0, 1], 3))
    job.schedule()
    job.execute()
    assert job.scheduler.num_cached_blocks == 0, "not before its result"
    job.commit()
    assert job.scheduler.num_cached_blocks == 2
    job.run([])


@pytest.mark.parametrize("draft_max_seq_len", [None, 64])
def test_bonus_hole_is_not_shared(draft_max_seq_len: int | None) -> None:
    """The draft may lack the token before the last one; the target has all but the last."""
    job = Job(SchedulerLimits(1, 64, 64, draft_max_seq_len, 3 if draft_max_seq_len else 0, 1, 40), acceptance=1.0)
    running = job.add(make_request(0, [1], 12))
    job.step()
    while len(running.token_ids) < 5:
        job.step()
    assert job.scheduler.num_cached_blocks == len(running.token_ids) - (2 if draft_max_seq_len else 1)
    job.run([])


def test_a_block_that_another_request_still_holds_is_reused_too() -> None:
    job = Job(SchedulerLimits(2, 64, 64, 64, 2, 2, 40))
    first = job.add(make_request(0, [1, 2, 3, 4, 5], 20))
    job.step()
    second = job.add(make_request(1, [1, 2, 3, 4, 6], 20))
    job.step()
    assert second.table.blocks[:2] == first.table.blocks[:2]
    assert second.table.blocks[2] != first.table.blocks[2]
    job.run([])


def test_a_block_with_a_snapshot_takes_the_place_of_one_that_has_lost_its_own() -> None:
    """Though the other is in the draft's store, too: no row could begin behind that one again."""
    pool, snapshots = BlockPool(9), StateSnapshots(3)
    cache = PrefixCache(pool, snapshots=snapshots)
    tokens = list(range(8))

    def row(in_draft_store: bool, takes: bool) -> list[int]:
        table = BlockTable(pool, cache, 4)
        table.reserve(8)
        assert not takes or table.take_snapshot(8) is not None
        table.commit(tokens, 8, in_draft_store)
        blocks = [*table.blocks]
        table.release()
        return blocks

    def found(in_draft_store: bool) -> list[int]:
        return BlockTable(pool, cache, 4).match_prefix([*tokens, 9], in_draft_store)

    first = row(True, True)
    assert found(True) == found(False) == first
    for block in (7, 8):  # two other rows' take all there are
        snapshots.hold([block])
    assert found(True) == found(False) == []
    snapshots.release([7, 8])
    second = row(False, True)
    assert found(False) == [first[0], second[1]] and found(True) == []
    third = row(True, True)
    assert found(True) == found(False) == [first[0], third[1]]


def test_a_row_knows_where_it_parts_from_others_as_long_as_they_are_known() -> None:
    """Not where another ended, and not where a snapshot is: there it can begin."""
    pool, snapshots = BlockPool(9), StateSnapshots(3)
    cache = PrefixCache(pool, snapshots=snapshots)

    def commit(tokens: list[int], takes: bool = False) -> None:
        table = BlockTable(pool, cache, 4)
        table.reserve(len(tokens))
        assert not takes or table.take_snapshot(len(tokens)) is not None
        table.commit(tokens, len(tokens))
        table.release()

    def parting(tokens: list[int]) -> int:
        table = BlockTable(pool, cache, 4)
        table.match_prefix(tokens)
        return table.parting

    first, other = list(range(16)), [*range(8), *range(30, 40)]
    commit(first)
    assert parting(other) == 8 and parting([*first, 7]) == 0 and parting([7, *first]) == 0
    commit(other[:8], takes=True)
    assert parting(other) == 0
    cache.clear()
    commit(first[:8])
    assert parting(other) == 0
    commit(first)
    assert parting(other) == 8
    pool.allocate(6)  # of 8 blocks: ends of chains are forgotten first
    assert len(cache) == 2 and parting(other) == 0
