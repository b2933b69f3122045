"""What adapters add to a linear layer on the CPU: the lines of each adapter go through products of its own.

The products are those of linear layers, which give a line the same bits in any company (matmul.py); so do these. It
knows slots and products. It does not know adapters' files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from trtrun.kernels.line_slots import LineSlots
from trtrun.kernels.torch.low_rank import Factors, Install, LowRank, LowRankShape
from trtrun.kernels.torch.operations import Product

_RANKS = 8
"""Ranks are filled up with zeros to a multiple of it: kernels take pairs of input features."""


class CpuLowRank(LowRank):
    """See LowRank. Slots are empty until they are filled.

    Args:
        shape: of the layer.
        product: of a weight [out, in].
    """

    def __init__(self, shape: LowRankShape, product: Callable[[torch.Tensor], Product]) -> None:
        self._shape = shape
        self._product = product
        self._slots: dict[int, tuple[Product, list[tuple[slice, slice, Product]]]] = {}

    def prepare(self, factors: Sequence[Factors | None]) -> Install:
        """See LowRank."""
        downs, ups, start, rank = [], [], 0, 0
        for outputs, of_matrix in zip(self._shape.outputs, factors, strict=True):
            if of_matrix is not None:
                missing = -of_matrix.down.shape[0] % _RANKS
                downs.append(functional.pad(of_matrix.down, (0, 0, 0, missing)))
                up = functional.pad(of_matrix.up, (0, missing))
                end = rank + up.shape[1]
                ups.append((slice(start, start + outputs), slice(rank, end), self._product(up)))
                rank = end
            start += outputs
        filled = (self._product(torch.cat(downs)), ups) if downs else None

        def install(slot: int) -> None:
            self._slots.pop(slot, None)
            if filled is not None:
                self._slots[slot] = filled

        return install

    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """See LowRank."""
        for slot, of_slot in lines.groups:
            if slot not in self._slots:
                continue
            down, ups = self._slots[slot]
            low = down(x if of_slot is None else x.index_select(0, of_slot))
            for columns, ranks, up in ups:
                part, added = y[:, columns], up(low[:, ranks].contiguous())
                if of_slot is None:
                    part.add_(added)
                else:
                    part[of_slot] = part.index_select(0, of_slot) + added
