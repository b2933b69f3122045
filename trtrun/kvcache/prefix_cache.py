"""Reuse of full blocks between rows: a block is found again by the chain of all tokens up to its end.

It knows blocks and tokens. Which tokens are verified or written the scheduler says. The idea of hashing (parent, tokens
of the block) is from vLLM's automatic prefix caching.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from trtrun.kvcache.block_places import BlockPlaces
from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.state_snapshots import StateSnapshots
from trtrun.kvcache.window_blocks import WindowBlocks

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
        windows: the places of blocks in layers with windows, which may be reused as long as their blocks may; None
            where no layer has places.
        snapshots: of states at the ends of blocks, likewise; None where no layer keeps states.
    """

    def __init__(
        self,
        pool: BlockPool,
        enabled: bool = True,
        windows: WindowBlocks | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.enabled = enabled
        self.windows = windows
        self.snapshots = snapshots
        self._beside: list[BlockPlaces] = [places for places in (windows, snapshots) if places is not None]
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._target_only: set[int] = set()
        self._parent_of: dict[int, bytes] = {}
        self._followers: Counter[bytes] = Counter()
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

    def goes_on(self, digest: bytes) -> bool:
        """Whether any cached block follows a chain."""
        return self._followers[digest] > 0

    def register(self, block: int, digest: bytes, in_draft_store: bool = True, parent: bytes = NO_ADAPTER) -> None:
        """Offer a held block for reuse. Where another block already holds the same chain, that one stays, unless it has
        lost its place, or its snapshot, and this one has one, as no row could ever begin behind it again; or it is in
        the target's store alone and this one is not.

        The caller guarantees that all its tokens are verified, that the target has written it whole, and the draft too
        with `in_draft_store`, and that nobody writes to it again. `parent` is the chain that it follows.
        """
        if not self.enabled or block in self._digest_of:
            return
        other = self._block_of.get(digest)
        if other is not None:
            if self._worth(block, in_draft_store) <= self._worth(other, other not in self._target_only):
                return
            self._forget(other)
            self._pool.unmark_cached(other)
        self._block_of[digest] = block
        self._digest_of[block] = digest
        self._parent_of[block] = parent
        self._followers[parent] += 1
        if not in_draft_store:
            self._target_only.add(block)
        self._pool.mark_cached(block)
        for places in self._beside:
            places.mark_cached(block)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Offer some blocks no more, where they are offered; who holds them keeps them."""
        for block in blocks:
            if block in self._digest_of:
                self._forget(block)
                self._pool.unmark_cached(block)

    def clear(self) -> None:
        """Forget every chain; evictable blocks become free."""
        for block in self._digest_of:
            self._pool.unmark_cached(block)
            for places in self._beside:
                places.unmark_cached(block)
        self._block_of.clear()
        self._digest_of.clear()
        self._parent_of.clear()
        self._followers.clear()
        self._target_only.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        parent = self._parent_of.pop(block)
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
        self._target_only.discard(block)
        for places in self._beside:
            places.unmark_cached(block)

    def _worth(self, block: int, in_draft_store: bool) -> tuple[bool, ...]:
        """What speaks for a block among those that hold one chain."""
        return *(places.has_place(block) for places in self._beside), in_draft_store
