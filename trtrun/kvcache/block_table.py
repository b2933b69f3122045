"""One row's block table: blocks are reserved ahead of a round, committed for reuse after it, and released at the end.

The same table serves draft and target: block b is slot b in both stores. Where layers with windows have places
(window_blocks.py), the table holds those of its last blocks alone. It does not know which tokens are verified or
written; the scheduler says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix_cache import NO_ADAPTER, PrefixCache, extend_digests


class BlockTable:
    """Blocks of one request. It outlives preemption, so that the digests of its tokens are computed once.

    Attributes:
        blocks: block of positions [index * block_size, (index + 1) * block_size), for each index.
        num_committed_blocks: leading blocks that were offered for reuse (or reused); this row never writes there again.
        placed: indices of the blocks whose places it holds, where layers with windows have places.
        first_snapshot: of the states that it began with; the null snapshot where it began with none.
        parting: positions behind which its tokens are others than those of the row that it shares most with, where no
            snapshot is, as last matched; 0 where there is none. A snapshot there serves whoever shares as much.
    """

    __slots__ = (
        *("_block_size", "_cache", "_digests", "_num_behind", "_pool", "_root", "_snapshots", "_taken", "_windows"),
        *("blocks", "first_snapshot", "num_committed_blocks", "parting", "placed"),
    )

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, num_behind: int = 0, root: bytes = NO_ADAPTER
    ) -> None:
        """Make an empty table. What is kept of a block depends on `num_behind` tokens behind it, 0 or 1: blocks are
        reused where these are the same, too. `root` tells what computes it: blocks are shared within one alone."""
        self._pool = pool
        self._cache = cache
        self._windows = cache.windows
        self._snapshots = cache.snapshots
        self._taken: dict[int, int] = {}
        self._block_size = block_size
        self._num_behind = num_behind
        self._root = root
        self._digests: list[bytes] = []
        self.blocks: list[int] = []
        self.num_committed_blocks = 0
        self.placed = range(0)
        self.first_snapshot = self.parting = 0

    @property
    def capacity(self) -> int:
        """Positions that the blocks held so far can take."""
        return len(self.blocks) * self._block_size

    def match_prefix(
        self, tokens: Sequence[int], in_draft_store: bool = True, most_positions: int | None = None
    ) -> list[int]:
        """Cached blocks that hold the start of `tokens`, leaving at least the last token to be computed; those that are
        in the target's store alone among them unless `in_draft_store`. With windows as many as have places where the
        tokens behind them look; with states as many as have a snapshot at their end.

        The last token is computed again because its logits are needed, and only keys and values are stored.

        Args:
            tokens: of the row.
            in_draft_store: whether the draft's store must have them, too.
            most_positions: that may come from the cache; None for no other limit.
        """
        if not self._cache.enabled:
            return []
        count = (len(tokens) - 1) // self._block_size
        extend_digests(self._digests, tokens, self._block_size, count, self._num_behind, self._root)
        if most_positions is not None:
            count = min(count, most_positions // self._block_size)
        found = self._cache.match(self._digests[:count], in_draft_store)
        known, length = len(found), -1
        while length != len(found):  # either may leave fewer than the other allows
            length = len(found)
            if self._windows is not None:
                found = found[: self._windows.longest_start(found)]
            if self._snapshots is not None:
                found = found[: self._snapshots.longest_start(found)]
        parts = self._snapshots is not None and known > length and self._cache.goes_on(self._digests[known - 1])
        self.parting = known * self._block_size if parts else 0
        return found

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start the (empty) table with blocks from `match_prefix`, for reading only."""
        if self.blocks:
            raise RuntimeError(f"a table that holds {len(self.blocks)} blocks cannot adopt others")
        for block in blocks:
            self._pool.acquire(block)
        self.blocks.extend(blocks)
        self.num_committed_blocks = len(blocks)
        if self._windows is not None:
            self.placed = self._windows.seen_behind(len(blocks))
            self._windows.share(self.blocks[self.placed.start :])
        if self._snapshots is not None:
            self.first_snapshot = self._snapshots.use(blocks[-1]) if blocks else 0

    def take_snapshot(self, num_positions: int) -> int | None:
        """The snapshot to be taken behind the row's first `num_positions`, whole blocks that it has; None where there
        is none to be had."""
        if self._snapshots is None:
            return None
        index = num_positions // self._block_size - 1
        snapshot = self._snapshots.take(self.blocks[index])
        if snapshot is not None:
            self._taken[index] = self.blocks[index]
        return snapshot

    def reserve(self, num_positions: int) -> int:
        """Hold blocks for positions below `num_positions`; return the index of the first new block.

        Raises:
            OutOfBlocksError: too few are available; then nothing changes.
        """
        first_new = len(self.blocks)
        missing = -(-num_positions // self._block_size) - first_new
        if missing > 0:
            self.blocks.extend(self._pool.allocate(missing))
        return first_new

    def hold_places(self, num_positions: int) -> None:
        """Hold places for the blocks of positions below `num_positions`, which it has, in layers with windows. Nothing
        where these have none.

        Raises:
            OutOfBlocksError: too few places are available; then nothing changes.
        """
        if self._windows is None:
            return
        end = -(-num_positions // self._block_size)
        if end > self.placed.stop:
            self._windows.hold(self.blocks[self.placed.stop : end])
            self.placed = range(self.placed.start, end)

    def give_back_places(self, position: int) -> None:
        """Give back the places of blocks that nothing that is fed at `position` or behind it sees through a window."""
        if self._windows is None:
            return
        first = min(self._windows.first_seen(position), self.placed.stop)
        if first > self.placed.start:
            left = self.blocks[self.placed.start : first]
            if self._cache.enabled:
                self._windows.leave(left)
            else:
                self._windows.release(left)
            self.placed = range(first, self.placed.stop)

    def commit(self, tokens: Sequence[int], num_positions: int, in_draft_store: bool = True) -> None:
        """Offer for reuse the full blocks within the first `num_positions` positions.

        Args:
            tokens: the row's verified tokens, at least `num_positions`, and those behind that blocks depend on.
            num_positions: positions whose tokens are verified, that the target has written, and that no engine will
                write again.
            in_draft_store: whether the draft has written them too; False where it does not follow the row.
        """
        full = num_positions // self._block_size
        if full > self.num_committed_blocks and self._cache.enabled:
            extend_digests(self._digests, tokens, self._block_size, full, self._num_behind, self._root)
            for index in range(self.num_committed_blocks, full):
                parent = self._digests[index - 1] if index else self._root
                self._cache.register(self.blocks[index], self._digests[index], in_draft_store, parent)
                if self._snapshots is not None and index in self._taken:
                    self._snapshots.release([self._taken.pop(index)])
            self.num_committed_blocks = full

    def withdraw(self) -> None:
        """Offer none of its blocks for reuse any more: what was computed with numbers that are not finite has left some
        in blocks of chunks, also behind tokens that no row fails on."""
        self._cache.withdraw(self.blocks)

    def release(self) -> None:
        """Give all blocks back. The last block goes first, so that ends of chains are evicted before starts."""
        if self._windows is not None:
            self._windows.release(self.blocks[self.placed.start : self.placed.stop])
            for block in self.blocks[: self.placed.start]:
                if not self._pool.is_cached(block):
                    self._windows.unmark_cached(block)
            self.placed = range(0)
        if self._snapshots is not None:
            self._snapshots.release([*self._taken.values()])
            self._taken.clear()
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()
        self.num_committed_blocks = 0
