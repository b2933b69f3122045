"""What adapters add to a linear layer, as two Triton kernels for CUDA: lines of many adapters in one launch each.

A program takes a tile of lines and one slot, and ends at once where no line of the tile has it; of the others it
computes those that have. The first kernel multiplies with `down`, the second with `up` and adds to the layer's result
(the shrink and expand of Punica, arXiv:2310.18547). The inputs are cut into shares, so that few lines keep more than a
few multiprocessors busy: how many follows from the layer's shape alone, and their sums add in order. A tile is always
as large, so that a line has the same bits in any company.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.line_slots import LineSlots
from trtrun.kernels.torch.low_rank import LowRankShape, StackedFactors

_LINES = 16
"""What a tile of the tensor cores takes."""
_INPUTS, _FEATURES = 128, 64
_MOST_SHARES = 8
_WIDEST = 64
"""Ranks that a program takes at once."""


@triton.jit(do_not_specialize=["lines"])
def _shrink_kernel(
    x, down, low, slots, lines, ranks, inputs, x_stride, share, blocks,
    LINES: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """low[share, line] = x[line] @ down[slot of the line].T, over the inputs of a share."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    slot = tl.program_id(2)
    is_theirs = tl.load(slots + line, mask=line < lines, other=0) == slot + 1
    if tl.max(is_theirs.to(tl.int32), axis=0) > 0:
        number_of_share = tl.program_id(1) // blocks
        rank = tl.program_id(1) % blocks * RANKS + tl.arange(0, RANKS)
        weight = down + (slot.to(tl.int64) * ranks + rank[None, :]) * inputs
        total = tl.zeros((LINES, RANKS), dtype=tl.float32)
        for start in range(0, share, INPUTS):
            number = number_of_share * share + start + tl.arange(0, INPUTS)
            known = number < inputs
            values = tl.load(
                x + line[:, None] * x_stride + number[None, :], mask=is_theirs[:, None] & known[None, :], other=0.0
            )
            weights = tl.load(weight + number[:, None], mask=known[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        place = low + (number_of_share.to(tl.int64) * lines + line[:, None]) * ranks + rank[None, :]
        tl.store(place, total, mask=is_theirs[:, None])


@triton.jit(do_not_specialize=["lines"])
def _expand_kernel(
    y, low, up, slots, starts, lines, ranks, features, y_stride, blocks,
    LINES: tl.constexpr, FEATURES: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """y[line] += the sum of the shares of low[line] @ up[slot of the line].T, matrix by matrix."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    slot, matrix = tl.program_id(2), tl.program_id(1) // blocks
    is_theirs = tl.load(slots + line, mask=line < lines, other=0) == slot + 1
    first = tl.load(starts + matrix) + tl.program_id(1) % blocks * FEATURES
    end = tl.load(starts + matrix + 1)
    if (tl.max(is_theirs.to(tl.int32), axis=0) > 0) & (first < end):
        feature = first + tl.arange(0, FEATURES)
        known = feature < end
        weight = up + (slot.to(tl.int64) * features + feature[None, :]) * RANK
        total = tl.zeros((LINES, FEATURES), dtype=tl.float32)
        for start in range(0, RANK, RANKS):
            rank = start + tl.arange(0, RANKS)
            values = tl.zeros((LINES, RANKS), dtype=tl.float32)
            for share in range(SHARES):
                place = low + (share * lines + line[:, None]) * ranks + matrix * RANK + rank[None, :]
                values += tl.load(place, mask=is_theirs[:, None], other=0.0)
            weights = tl.load(weight + rank[:, None], mask=known[None, :], other=0.0)
            total = tl.dot(values.to(up.dtype.element_ty), weights, total, input_precision="ieee")
        place = y + line[:, None] * y_stride + feature[None, :]
        mask = is_theirs[:, None] & known[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(y.dtype.element_ty), mask=mask)


class TritonLowRank(StackedFactors):
    """See LowRank. Ranks are filled up to a multiple of what tensor cores take."""

    def __init__(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape._replace(max_rank=padded_rank(shape.max_rank)), dtype, device)
        starts = [sum(shape.outputs[:count]) for count in range(len(shape.outputs) + 1)]
        self._starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self._ranks = next(width for width in (_WIDEST, 32, _LINES) if self.shape.max_rank % width == 0)
        pieces = -(-shape.inputs // _INPUTS)
        self._share = -(-pieces // _MOST_SHARES) * _INPUTS
        self._shares = -(-shape.inputs // self._share)

    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """See LowRank; x and y without gaps in a line."""
        shape, count = self.shape, x.shape[0]
        if not count:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        ranks, features = self.down.shape[1], self.up.shape[1]
        low = torch.empty((self._shares, count, ranks), dtype=torch.float32, device=x.device)
        tiles, blocks = triton.cdiv(count, _LINES), ranks // self._ranks
        _shrink_kernel[(tiles, blocks * self._shares, shape.num_slots)](
            x, self.down, low, lines.slots, count, ranks, shape.inputs, x.stride(0), self._share, blocks,
            LINES=_LINES, RANKS=self._ranks, INPUTS=_INPUTS, num_warps=4, num_stages=3,
        )  # fmt: skip
        blocks = triton.cdiv(max(shape.outputs), _FEATURES)
        _expand_kernel[(tiles, blocks * len(shape.outputs), shape.num_slots)](
            y, low, self.up, lines.slots, self._starts, count, ranks, features, y.stride(0), blocks,
            LINES=_LINES, FEATURES=_FEATURES, RANK=shape.max_rank, RANKS=self._ranks, SHARES=self._shares,
            num_warps=4, num_stages=2,
        )  # fmt: skip


def padded_rank(rank: int) -> int:
    """What a slot takes of an adapter of `rank`."""
    return -(-rank // _LINES) * _LINES
