"""The pool of KV blocks: who holds a block, which are free, and which free ones still hold reusable tokens; reuse of
full blocks between rows, where a block is found again by the chain of all tokens up to its end; and one row's block
table.

The same table serves draft and target: block b is slot b in both stores. Which tokens are verified or written the
scheduler says: blocks are reserved ahead of a round, committed for reuse after it, and released at the end. `store.py`
holds the keys and values. The idea of hashing (parent, tokens of the block) is from vLLM's automatic prefix caching.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

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


DIGEST_BYTES = 32

NO_ADAPTER = b"\0" * DIGEST_BYTES
"""The root of chains that the base model computes."""


def salted(root: bytes, salt: str | None) -> bytes:
    """The root of chains that are shared within one salt alone; the same root without a salt."""
    if salt is None:
        return root
    return blake2b(root + salt.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def extend_digests(
    digests: list[bytes],
    tokens: Sequence[int],
    block_size: int,
    num_blocks: int,
    num_behind: int = 0,
    root: bytes = NO_ADAPTER,
) -> None:
    """Append to `digests` until it holds those of the first `num_blocks` full blocks of `tokens`.

    Each digest is BLAKE2b over the parent's digest and the block's token ids (int32), so it names the whole chain. A
    cryptographic digest of 256 bits is taken as equality of tokens: Python's own `hash` would let a crafted prompt
    read another request's keys and values.

    Args:
        digests: of the first blocks.
        tokens: at least those of the blocks, and `num_behind` more.
        block_size: tokens of a block.
        num_blocks: how many digests there are to be.
        num_behind: tokens behind a block that it depends on, and that its chain names, too.
        root: stands for the parent of the first: chains of two adapters have no block in common.
    """
    parent = digests[-1] if digests else root
    for index in range(len(digests), num_blocks):
        start = index * block_size + num_behind if index else 0
        block_tokens = array("i", tokens[start : (index + 1) * block_size + num_behind])
        parent = blake2b(parent + block_tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """Which block holds which token chain.

    Args:
        pool: its evictions remove blocks from this cache.
        enabled: when False nothing is ever registered or found.
    """

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._target_only: set[int] = set()
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def blocks(self) -> frozenset[int]:
        """All blocks that may be handed to another row."""
        return frozenset(self._digest_of)

    def match(self, digests: Sequence[bytes], in_draft_store: bool = True) -> list[int]:
        """Blocks of the longest cached chain that `digests` starts with, in the draft's store too if that is asked for.
        Takes no reference."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None or (in_draft_store and block in self._target_only):
                break
            found.append(block)
        return found

    def register(self, block: int, digest: bytes, in_draft_store: bool = True) -> None:
        """Offer a held block for reuse. Where another block already holds the same chain, that one stays, unless it is
        in the target's store alone and this one is not.

        The caller guarantees that all its tokens are verified, that the target has written it whole, and the draft too
        with `in_draft_store`, and that nobody writes to it again.
        """
        if not self.enabled or block in self._digest_of:
            return
        other = self._block_of.get(digest)
        if other is not None:
            if not in_draft_store or other not in self._target_only:
                return
            self._forget(other)
            self._pool.unmark_cached(other)
        self._block_of[digest] = block
        self._digest_of[block] = digest
        if not in_draft_store:
            self._target_only.add(block)
        self._pool.mark_cached(block)

    def clear(self) -> None:
        """Forget every chain; evictable blocks become free."""
        for block in self._digest_of:
            self._pool.unmark_cached(block)
        self._block_of.clear()
        self._digest_of.clear()
        self._target_only.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        self._target_only.discard(block)


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
