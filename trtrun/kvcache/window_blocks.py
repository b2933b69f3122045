"""Places of blocks in the store of layers with a sliding window: which block has one, and who holds it.

A layer with a window looks back no further than the window, so that its keys and values of a row's older blocks are of
no use to the row. So these layers have a store of their own, of places, fewer than there are blocks; block tables stay
what they are, and ranks translate them by `block -> place` (window_places.py). A row holds places for its last blocks
alone. One that it gives back keeps what it holds, until the place is needed, where other rows may begin with the block;
a row can begin behind those blocks that have places as far back as a window looks.

It knows blocks and places. It does not know tokens, rows, or how keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtrun.kvcache.blocks import NULL_BLOCK, BlockPool


@dataclass(frozen=True)
class WindowRule:
    """What layers with windows need of each row, in all engines of a job that share its block tables.

    Attributes:
        window: the longest; a position sees itself and `window - 1` before it.
        fed_again: positions that an engine may feed once more of a prefix that another row has written.
        chunk: tokens of a prompt that a row reads in a round, at most.
        blocks_per_row: blocks of a row that have places at a time, at most.
    """

    window: int
    fed_again: int
    chunk: int
    blocks_per_row: int


class WindowBlocks:
    """The places of one job: which blocks have them, and how often each is held.

    A place is held by the rows that look at its block. What nobody holds is free, or evictable where the block is in
    the prefix cache, or may get there as long as a row holds it; the place that was given back first is evicted first.
    """

    def __init__(self, num_places: int, rule: WindowRule, block_size: int) -> None:
        """Begin with `num_places` places, the null place among them, and no block that has one."""
        self._pool = BlockPool(num_places)
        self._pool.on_evict = self._forget_place
        self._window = rule.window
        self._block_size = block_size
        self._num_seen = -(-(rule.window - 1 + rule.fed_again) // block_size)
        self._place_of: dict[int, int] = {}
        self._block_at: dict[int, int] = {}
        self._changed: dict[int, int] = {}

    @property
    def num_available(self) -> int:
        """Places that `hold` can give."""
        return self._pool.num_available

    def has_place(self, block: int) -> bool:
        """Whether what these layers keep of a block is there."""
        return block in self._place_of

    def first_seen(self, position: int) -> int:
        """Index in a row's table of the first block that a token at `position` sees."""
        return max(0, position - self._window + 1) // self._block_size

    def seen_behind(self, num_blocks: int) -> range:
        """Indices of the blocks that a row sees that begins behind `num_blocks` blocks of another."""
        return range(max(0, num_blocks - self._num_seen), num_blocks)

    def longest_start(self, blocks: Sequence[int]) -> int:
        """How many of a row's first `blocks` it can begin with, so that all have places that it sees behind them."""
        end = at = len(blocks)
        while at > end - self._num_seen and at:
            at -= 1
            if blocks[at] not in self._place_of:
                end = at
        return end

    def num_evictable_of(self, blocks: Sequence[int]) -> int:
        """How many of the places of `blocks` nobody holds."""
        return sum(self._pool.is_evictable(self._place_of[block]) for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Give each of some blocks that nobody else has a place, held once.

        Raises:
            OutOfBlocksError: fewer are available; then none is given.
        """
        for block, place in zip(blocks, self._pool.allocate(len(blocks)), strict=True):
            self._place_of[block], self._block_at[place] = place, block
            self._changed[block] = place

    def share(self, blocks: Sequence[int]) -> None:
        """Hold the places of cached blocks once more."""
        for block in blocks:
            self._pool.acquire(self._place_of[block])

    def leave(self, blocks: Sequence[int]) -> None:
        """Give back one hold of the place of each of some blocks that a row still has, and that may be cached yet: the
        plan that writes them may have no result so far."""
        for block in blocks:
            self.mark_cached(block)
        self.release(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold of the place of each block; the last one of a block that is not cached frees it."""
        for block in blocks:
            place = self._place_of[block]
            self._pool.release(place)
            if not self._pool.references(place) and not self._pool.is_cached(place):
                self._forget_place(place)

    def mark_cached(self, block: int) -> None:
        """Rows may begin with a block from now on; nothing where it has no place."""
        place = self._place_of.get(block)
        if place is not None and not self._pool.is_cached(place):
            self._pool.mark_cached(place)

    def unmark_cached(self, block: int) -> None:
        """No row may begin with a block any more, or ever: its place is free once nobody holds it."""
        place = self._place_of.get(block)
        if place is not None:
            self._pool.unmark_cached(place)
            if not self._pool.references(place):
                self._forget_place(place)

    def take_changes(self) -> list[tuple[int, int]]:
        """Blocks that got a place since the last call, or lost it (the null place), which the ranks must be told: each
        once, with its place."""
        changed = [*self._changed.items()]
        self._changed.clear()
        return changed

    def forget_all(self, num_blocks: int) -> None:
        """Have the ranks forget the places of all blocks, also those that this object never gave away."""
        self._changed = dict.fromkeys(range(1, num_blocks), NULL_BLOCK)

    def leaks(self) -> list[str]:
        """What stands in the way of "every place is free or evictable", as phrases."""
        return [f"of places, {phrase}" for phrase in self._pool.leaks()]

    def _forget_place(self, place: int) -> None:
        block = self._block_at.pop(place)
        del self._place_of[block]
        self._changed[block] = NULL_BLOCK
