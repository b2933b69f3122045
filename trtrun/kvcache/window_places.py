"""Where a rank keeps what layers with a sliding window store of each block: a place in a store of their own.

Which block has which place plans say (window_blocks.py); block tables are translated for these layers. It knows blocks
and places as tensors. It does not know who holds them, or what lies there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK


@dataclass(frozen=True)
class WindowSpace:
    """The places of one engine's store.

    Attributes:
        layers: of each layer of the model, whether it has a window.
        num_places: of rows, the null place among them.
    """

    layers: tuple[bool, ...]
    num_places: int


class WindowPlaces:
    """Which place each block of a store has.

    Args:
        space: of the engine.
        num_blocks: blocks of the store, those of rows first.
        num_row_blocks: of these those of rows, the null block among them; each of the others has a place of its own
            behind those of rows.
        device: where tables are.
    """

    def __init__(self, space: WindowSpace, num_blocks: int, num_row_blocks: int, device: torch.device) -> None:
        self.num_places = space.num_places + num_blocks - num_row_blocks
        self._places = torch.full((num_blocks,), NULL_BLOCK, dtype=torch.int64, device=device)
        self._places[num_row_blocks:] = torch.arange(space.num_places, self.num_places, device=device)

    def announce(self, updates: np.ndarray) -> None:
        """Take in which blocks got or lost places: [n, 2] whole numbers, block and place, each block once."""
        if len(updates):
            moved = torch.from_numpy(updates.astype(np.int64).T.copy()).to(self._places.device, non_blocking=True)
            self._places.index_copy_(0, moved[0], moved[1])

    def places(self, blocks: torch.Tensor) -> torch.Tensor:
        """Places of blocks, int64 of any shape on the device, such as tables."""
        return self._places.index_select(0, blocks.reshape(-1)).view(blocks.shape)
