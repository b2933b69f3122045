"""The block pool under random use against a plain model, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtrun.kvcache.blocks import NULL_BLOCK, BlockPool, OutOfBlocksError

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """The model: a count per block, the cached ones, and the evictable ones in order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.counts: dict[int, int] = {}
        self.cached: set[int] = set()
        self.evictable: list[int] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = NUM_BLOCKS - 1 - len(self.counts) - len(self.evictable)
        if count > free + len(self.evictable):
            with pytest.raises(OutOfBlocksError, match=str(count)):
                self.pool.allocate(count)
            return
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        taken = max(0, count - free)
        assert self.evicted == self.evictable[:taken], "the least recently released block is evicted first"
        self.cached -= set(self.evictable[:taken])
        self.evictable = self.evictable[taken:]
        assert len(set(blocks)) == count and not set(blocks) & set(self.counts), "a block is given out once"
        assert NULL_BLOCK not in blocks and not set(blocks) & set(self.evictable)
        self.counts.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.acquire(block)
        self.counts[block] = self.counts.get(block, 0) + 1
        if block in self.evictable:
            self.evictable.remove(block)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release(block)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            del self.counts[block]
            if block in self.cached:
                self.evictable.append(block)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def mark_cached(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.mark_cached(block)
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def unmark_cached(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.unmark_cached(block)
        self.cached.remove(block)
        if block in self.evictable:
            self.evictable.remove(block)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, NUM_BLOCKS - 1))
        if block not in self.cached:
            with pytest.raises(RuntimeError, match=f"block {block} is not cached"):
                self.pool.acquire(block)
        if block not in self.counts:
            with pytest.raises(RuntimeError, match=f"block {block} is released but nobody"):
                self.pool.release(block)
            with pytest.raises(RuntimeError, match=f"block {block} is not held"):
                self.pool.mark_cached(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert [self.pool.references(b) for b in range(NUM_BLOCKS)] == [
            self.counts.get(b, 0) for b in range(NUM_BLOCKS)
        ]
        assert {b for b in range(NUM_BLOCKS) if self.pool.is_cached(b)} == self.cached
        assert {b for b in range(NUM_BLOCKS) if self.pool.is_evictable(b)} == set(self.evictable)
        assert self.pool.num_evictable == len(self.evictable)
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(self.counts) - len(self.evictable)
        assert self.pool.num_available == self.pool.num_free + self.pool.num_evictable
        assert bool(self.pool.leaks()) == bool(self.counts)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="block 0"):
        pool.release(NULL_BLOCK)


def test_leaks_name_the_blocks() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.release(first)
    assert pool.leaks() == [f"block {second} has 1 references"]
    pool._free.append(first)
    pool._free.remove(4)
    assert set(pool.leaks()) == {
        f"block {second} has 1 references",
        f"block {first} is listed twice",
        "block 4 is lost",
    }


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="not 1"):
        BlockPool(1)
