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

from typing_extensions import override

from trtrun.kvcache.block_places import BlockPlaces
from trtrun.kvcache.blocks import NULL_BLOCK


@dataclass(frozen=True)
class WindowRule:
    """What layers with windows need of each row, in all engines of a job that share its block tables.

    Attributes:
        window: the longest; a position sees itself and `window - 1` before it.
        fed_again: positions that an engine may feed once more of a prefix that another row has written.
        chunk: tokens of a prompt that a row reads in a round, at most.
        blocks_per_row: blocks of a row that have places at a time, at most.
        blocks_beside: blocks of each other row that there are places for, where memory allows: as many as a row needs
            with a short chunk, because a round has tokens for one long chunk alone.
    """

    window: int
    fed_again: int
    chunk: int
    blocks_per_row: int
    blocks_beside: int


class WindowBlocks(BlockPlaces):
    """The places of one job, each held by the rows that look at its block. One that a row has left is evictable as long
    as the row has the block, which may get into the prefix cache yet."""

    def __init__(self, num_places: int, rule: WindowRule, block_size: int) -> None:
        """Begin with `num_places` places, the null place among them, and no block that has one."""
        super().__init__(num_places, "places")
        self._window = rule.window
        self._block_size = block_size
        self._num_seen = -(-(rule.window - 1 + rule.fed_again) // block_size)
        self._changed: dict[int, int] = {}

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

    @override
    def hold(self, blocks: Sequence[int]) -> list[int]:
        places = super().hold(blocks)
        self._changed.update(zip(blocks, places, strict=True))
        return places

    def leave(self, blocks: Sequence[int]) -> None:
        """Give back one hold of the place of each of some blocks that a row still has, and that may be cached yet: the
        plan that writes them may have no result so far."""
        for block in blocks:
            self.mark_cached(block)
        self.release(blocks)

    def take_changes(self) -> list[tuple[int, int]]:
        """Blocks that got a place since the last call, or lost it (the null place), which the ranks must be told: each
        once, with its place."""
        changed = [*self._changed.items()]
        self._changed.clear()
        return changed

    def forget_all(self, num_blocks: int) -> None:
        """Have the ranks forget the places of all blocks, also those that this object never gave away."""
        self._changed = dict.fromkeys(range(1, num_blocks), NULL_BLOCK)

    @override
    def _forget_place(self, place: int) -> None:
        self._changed[self._block_at[place]] = NULL_BLOCK
        super()._forget_place(place)
