"""With which adapter the keys and values of each block are made, and so the slot of each token of a forward.

A block is shared between rows of the same adapter alone (`BlockTable`), so that a row's first block says what the row
computes with: the batch's block tables, which graphs read in any case, are all that a forward needs to know. It knows
blocks and numbers. It does not know rows or adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.kvcache.segments import AttentionBatch
from trtrun.tensors import device_integers


class BlockSlots:
    """The slot of each block of a store; 0 where there is none, as for the null block.

    Args:
        num_blocks: of the store.
        device: where the store lives.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._slots = torch.zeros(num_blocks, dtype=torch.int64, device=device)

    def assign(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Give each of some blocks its slot."""
        if blocks:
            where, values = device_integers([list(blocks), list(slots)], self._slots.device)
            self._slots.index_copy_(0, where, values)

    def of_batch(self, batch: AttentionBatch) -> torch.Tensor:
        """[tokens] int64: the slot of each token of a forward. It reads nothing back, so that it becomes a graph."""
        parts = []
        for segment in batch.segments:
            of_rows = self._slots.index_select(0, segment.block_tables[:, 0])
            parts.append(of_rows.unsqueeze(1).expand(-1, segment.queries).reshape(-1))
        places = parts[0] if len(parts) == 1 else torch.cat(parts)
        return places if batch.forks is None else places.index_select(0, batch.forks.places)
