"""Where layers with a sliding window keep keys and values: in a ring of blocks for each row, as long as the window and
what a round may write beside it.

Block c of a row lies at place c modulo the ring's length, over what fell out of the window: so nothing is ever given
back, and what a layer needs does not grow with the text. Which place a block has follows from the row and the index
that it was announced for; block tables stay what they are, and are translated for these layers. A prefix cannot be
found again, as another row writes elsewhere. It knows blocks and rows. It does not know layers' numbers or plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK


@dataclass(frozen=True)
class RingSpace:
    """The rings of one engine.

    Attributes:
        layers: of each layer of the model, whether it has a window.
        max_rows: rows that have a ring.
        blocks_per_row: blocks of a ring.
    """

    layers: tuple[bool, ...]
    max_rows: int
    blocks_per_row: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all rings, a null block before them."""
        return 1 + self.max_rows * self.blocks_per_row


class Rings:
    """Which place in the rings each block of a store has.

    Args:
        space: of the engine.
        num_blocks: blocks of the store, those of rows first.
        num_row_blocks: of these those of rows, the null block among them; each of the others has a place of its own
            behind the rings.
        device: where tables are.
    """

    def __init__(self, space: RingSpace, num_blocks: int, num_row_blocks: int, device: torch.device) -> None:
        self.space = space
        self.num_places = space.num_blocks + num_blocks - num_row_blocks
        self._places = torch.full((num_blocks,), NULL_BLOCK, dtype=torch.int64, device=device)
        self._places[num_row_blocks:] = torch.arange(space.num_blocks, self.num_places, device=device)

    def announce(self, updates: np.ndarray) -> None:
        """Take in blocks that rows get: [n, 3] whole numbers, row, index in its table, and block."""
        if not len(updates):
            return
        row, index, block = updates.astype(np.int64).T
        place = 1 + row * self.space.blocks_per_row + index % self.space.blocks_per_row
        moved = torch.from_numpy(np.stack((block, place))).to(self._places.device, non_blocking=True)
        self._places.index_copy_(0, moved[0], moved[1])

    def places(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of blocks, int64 of any shape on the device, such as tables."""
        return self._places.index_select(0, blocks.reshape(-1)).view(blocks.shape)
