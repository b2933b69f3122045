"""The pool of KV blocks: who holds a block, which are free, and which free ones still hold reusable tokens.

It knows no tokens (prefix_cache.py) and no rows (block_table.py). `store.py` holds the keys and values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

NULL_BLOCK = 0
"""Never given to a row: padding of block tables points here and padding tokens are written here."""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are available. Callers look at `num_available` first, so this is a defect."""


class BlockPool:
    """Reference-counted blocks 1 … num_blocks - 1. Block 0 is the null block.

    A block is in exactly one of three states: held (its count is above 0), free, or evictable (count 0, but marked
    cached, so that a later row may take it back with its tokens). `allocate` takes free blocks first, then evicts the
    least recently released evictable one.

    Args:
        num_blocks: blocks in the store, the null block among them; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_blocks
        self._cached = [False] * num_blocks
        # A stack: the block released last is handed out first, while its memory is still warm.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds but whose tokens may be reused."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and evictable."""
        return len(self._free) + len(self._evictable)

    def references(self, block: int) -> int:
        """How many rows hold the block."""
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block's tokens may be reused."""
        return self._cached[block]

    def is_evictable(self, block: int) -> bool:
        """Whether nobody holds the block but its tokens may be reused."""
        return block in self._evictable

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference, for writing.

        Raises:
            OutOfBlocksError: fewer are available; then none is taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"asked for {count} blocks of which {self.num_available} are available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._cached[block] = False
                if self.on_evict is not None:
                    self.on_evict(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Hold a cached block once more, for reading.

        Raises:
            RuntimeError: the block is not cached, so its content means nothing to another row.
        """
        if not self._cached[block]:
            raise RuntimeError(f"block {block} is not cached and cannot be shared")
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give back one reference; the last one makes the block free, or evictable when it is cached.

        Raises:
            RuntimeError: nobody holds the block (the null block among them).
        """
        count = self._references[block]
        if count <= 0:
            raise RuntimeError(f"block {block} is released but nobody holds it")
        self._references[block] = count - 1
        if count == 1:
            if self._cached[block]:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def mark_cached(self, block: int) -> None:
        """From now on the block, once released, keeps its tokens until it is evicted. The block must be held.

        Raises:
            RuntimeError: nobody holds the block.
        """
        if self._references[block] <= 0:
            raise RuntimeError(f"block {block} is not held and cannot be cached")
        self._cached[block] = True

    def unmark_cached(self, block: int) -> None:
        """The block's tokens are not reusable any more; an evictable block becomes free."""
        self._cached[block] = False
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)

    def leaks(self) -> list[str]:
        """What stands in the way of "every block is free or evictable": one phrase per block, empty when whole."""
        found = [f"block {block} has {count} references" for block, count in enumerate(self._references) if count]
        unheld = self._free + list(self._evictable)
        twice = [block for block, times in Counter(unheld).items() if times > 1]
        found += [f"block {block} is listed twice" for block in sorted(twice)]
        lost = set(range(1, self.num_blocks)) - set(unheld)
        found += [f"block {block} is lost" for block in sorted(lost) if not self._references[block]]
        return found
