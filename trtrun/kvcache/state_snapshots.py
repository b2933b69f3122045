"""Snapshots of rows' states: behind the ends of which blocks there are any.

A row can begin behind the blocks of another where there is a snapshot of its state at their end (row_states.py), and
only there. Snapshots are taken while prompts are read, at the last end of a block in each chunk; a chunk ends where the
prompt parts from one that was read before, as those with one system prompt do. They go when others need their places,
the one that was used longest ago first. It knows blocks. It does not know tokens, rows or states.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.kvcache.block_places import BlockPlaces


class StateSnapshots(BlockPlaces):
    """The snapshots of one job."""

    def __init__(self, num_snapshots: int) -> None:
        """Begin with none of `num_snapshots`, the null snapshot among them."""
        super().__init__(num_snapshots, "snapshots")

    def longest_start(self, blocks: Sequence[int]) -> int:
        """How many of a row's first `blocks` it can begin with."""
        return next((end for end in range(len(blocks), 0, -1) if self.has_place(blocks[end - 1])), 0)

    def use(self, block: int) -> int:
        """The snapshot at the end of a cached block, which a row begins with in the plan that is being made; it goes
        last from now on."""
        self.share([block])
        self.release([block])
        return self._place_of[block]

    def take(self, block: int) -> int | None:
        """A snapshot for the end of a block that a row is about to write, held until it is released; None where all are
        held."""
        return self.hold([block])[0] if self.num_available and not self.has_place(block) else None
