"""Places that some blocks have in a store of their own: which block has one, how often it is held, and which may go.

A place is held by the rows that need it. What nobody holds is free, or evictable where its block is in the prefix
cache: it keeps what lies there until the place is needed, and the one that was given back first goes first. It knows
blocks and places. It does not know what lies there, or what rows need.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.kvcache.blocks import BlockPool


class BlockPlaces:
    """Which blocks have places, and how often each is held.

    Args:
        num_places: there are, the null place among them; at least 2.
        name: of places, for people.
    """

    def __init__(self, num_places: int, name: str) -> None:
        self._pool = BlockPool(num_places)
        self._pool.on_evict = self._forget_place
        self._name = name
        self._place_of: dict[int, int] = {}
        self._block_at: dict[int, int] = {}

    @property
    def num_available(self) -> int:
        """Places that `hold` can give."""
        return self._pool.num_available

    def has_place(self, block: int) -> bool:
        """Whether a block has a place."""
        return block in self._place_of

    def hold(self, blocks: Sequence[int]) -> list[int]:
        """Give each of some blocks that nobody else has a place, held once; returns the places.

        Raises:
            OutOfBlocksError: fewer are available; then none is given.
        """
        places = self._pool.allocate(len(blocks))
        for block, place in zip(blocks, places, strict=True):
            self._place_of[block], self._block_at[place] = place, block
        return places

    def share(self, blocks: Sequence[int]) -> None:
        """Hold the places of cached blocks once more."""
        for block in blocks:
            self._pool.acquire(self._place_of[block])

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

    def leaks(self) -> list[str]:
        """What stands in the way of "every place is free or evictable", as phrases."""
        return [f"of {self._name}, {phrase}" for phrase in self._pool.leaks()]

    def _forget_place(self, place: int) -> None:
        del self._place_of[self._block_at.pop(place)]
