"""One row's block table: reserve blocks ahead of a round, commit them for reuse after it, release them at the end.

The same table serves draft and target: block b is slot b in both stores. It knows positions and tokens of one row; it
does not know rounds, plans, other rows or who is drafted: the scheduler says how far a row is reserved and verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.kvcache.blocks import NO_ADAPTER, BlockPool, PrefixCache, extend_digests


class BlockTable:
    """Blocks of one request. It outlives preemption, so that the digests of its tokens are computed once.

    Attributes:
        blocks: block of positions [index * block_size, (index + 1) * block_size), for each index.
        num_committed_blocks: leading blocks that were offered for reuse (or reused); this row never writes there again.
    """

    __slots__ = ("_block_size", "_cache", "_digests", "_num_behind", "_pool", "_root", "blocks", "num_committed_blocks")

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, num_behind: int = 0, root: bytes = NO_ADAPTER
    ) -> None:
        """Make an empty table. What is kept of a block depends on `num_behind` tokens behind it, 0 or 1: blocks are
        reused where these are the same, too. `root` tells what computes it: blocks are shared within one alone."""
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._num_behind = num_behind
        self._root = root
        self._digests: list[bytes] = []
        self.blocks: list[int] = []
        self.num_committed_blocks = 0

    @property
    def capacity(self) -> int:
        """Positions that the blocks held so far can take."""
        return len(self.blocks) * self._block_size

    def match_prefix(self, tokens: Sequence[int], in_draft_store: bool = True) -> list[int]:
        """Cached blocks that hold the start of `tokens`, leaving at least the last token to be computed; those that are
        in the target's store alone among them unless `in_draft_store`.

        The last token is computed again because its logits are needed, and only keys and values are stored.
        """
        if not self._cache.enabled:
            return []
        count = (len(tokens) - 1) // self._block_size
        extend_digests(self._digests, tokens, self._block_size, count, self._num_behind, self._root)
        return self._cache.match(self._digests[:count], in_draft_store)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start the (empty) table with blocks from `match_prefix`, for reading only."""
        if self.blocks:
            raise RuntimeError(f"a table that holds {len(self.blocks)} blocks cannot adopt others")
        for block in blocks:
            self._pool.acquire(block)
        self.blocks.extend(blocks)
        self.num_committed_blocks = len(blocks)

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
                self._cache.register(self.blocks[index], self._digests[index], in_draft_store)
            self.num_committed_blocks = full

    def release(self) -> None:
        """Give all blocks back. The last block goes first, so that ends of chains are evicted before starts."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()
        self.num_committed_blocks = 0
