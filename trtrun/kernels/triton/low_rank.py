"""What adapters add to a linear layer, as two Triton kernels for CUDA: lines of many adapters in one launch each.

Lines are sorted by slot once a forward, so that a program has a tile of lines of one slot: as many programs as slots
and lines could need, of which those that are left over end at once. The first kernel multiplies with `down`, the second
with `up` and adds to the layer's result (the shrink and expand of Punica, arXiv:2310.18547). The inputs are cut into
shares, so that few lines keep more than a few multiprocessors busy: how many follows from the layer's shape alone, and
their sums add in order. A tile is always as large, so that a line has the same bits in any company.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.line_slots import LineSlots
from trtrun.kernels.torch.low_rank import LowRankShape, StackedFactors
from trtrun.kernels.triton.early_launch import begin, early

_LINES = 16
"""What a tile of the tensor cores takes."""
_INPUTS, _FEATURES = 128, 128
_PIECES, _MOST_SHARES = 4, 32
"""Of the inputs, in a share and in all: so many steps of a program of the first kernel, and shares of a wide layer."""
_WIDEST = 64
"""Ranks that a program takes at once."""
_TURNS = 4
"""Tiles of features that a program of the second kernel has one after the other, for one reading of sums, where there
are many of them."""
_MANY = 1024


@triton.jit
def _tile(starts, order, pair, slots, SLOTS: tl.constexpr, LINES: tl.constexpr):
    """The lines [LINES] of a tile, which of them there are, and the slot that they have, from 0; none is left where the
    slot is `slots` or more."""
    number = tl.arange(0, SLOTS)
    first = tl.load(starts + number, mask=number < slots, other=0)
    end = tl.load(starts + number + 1, mask=number < slots, other=0)
    tiles = (end - first + LINES - 1) // LINES
    slot = tl.sum((tl.cumsum(tiles, 0) <= pair).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < slot, tiles, 0), axis=0)
    place = tl.sum(tl.where(number == slot, first, 0), axis=0) + (pair - before) * LINES + tl.arange(0, LINES)
    is_there = place < tl.sum(tl.where(number == slot, end, 0), axis=0)
    return tl.load(order + place, mask=is_there, other=0), is_there, slot


@triton.jit(do_not_specialize=["lines"])
def _shrink_kernel(
    x, down, low, starts, order, lines, ranks, inputs, x_stride, share, blocks, slots,
    SLOTS: tl.constexpr, LINES: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """low[share, line] = x[line] @ down[slot of the line].T, over the inputs of a share."""
    begin(EARLY)
    line, is_there, slot = _tile(starts, order, tl.program_id(0), slots, SLOTS, LINES)
    if slot < slots:
        number_of_share = tl.program_id(1) // blocks
        rank = tl.program_id(1) % blocks * RANKS + tl.arange(0, RANKS)
        weight = down + (slot.to(tl.int64) * ranks + rank[None, :]) * inputs
        total = tl.zeros((LINES, RANKS), dtype=tl.float32)
        for start in range(0, share, INPUTS):
            number = number_of_share * share + start + tl.arange(0, INPUTS)
            known = number < inputs
            values = tl.load(
                x + line[:, None] * x_stride + number[None, :], mask=is_there[:, None] & known[None, :], other=0.0
            )
            weights = tl.load(weight + number[:, None], mask=known[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        place = low + (number_of_share.to(tl.int64) * lines + line[:, None]) * ranks + rank[None, :]
        tl.store(place, total, mask=is_there[:, None])


@triton.jit
def _sum(of_line, is_there, lines, ranks, rank, kind: tl.constexpr, SHARES: tl.constexpr):
    """Some ranks of what the first kernel made of a tile's lines, rounded."""
    values = tl.zeros((is_there.shape[0], rank.shape[0]), dtype=tl.float32)
    for share in tl.static_range(SHARES):
        values += tl.load(of_line + share * lines * ranks + rank[None, :], mask=is_there[:, None], other=0.0)
    return values.to(kind)


@triton.jit(do_not_specialize=["lines"])
def _expand_kernel(
    y, low, up, starts, order, parts, lines, ranks, features, y_stride, blocks, slots,
    SLOTS: tl.constexpr, LINES: tl.constexpr, FEATURES: tl.constexpr, TURNS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[line] += the sum of the shares of low[line] @ up[slot of the line].T, matrix by matrix."""
    begin(EARLY)
    line, is_there, slot = _tile(starts, order, tl.program_id(0), slots, SLOTS, LINES)
    matrix = tl.program_id(1) // blocks
    first = tl.load(parts + matrix) + tl.program_id(1) % blocks * (FEATURES * TURNS)
    end = tl.load(parts + matrix + 1)
    if (slot < slots) & (first < end):
        of_line = low + line[:, None] * ranks + matrix * RANK
        values = _sum(of_line, is_there, lines, ranks, tl.arange(0, RANKS), up.dtype.element_ty, SHARES)
        for turn in range(TURNS):
            feature = first + turn * FEATURES + tl.arange(0, FEATURES)
            known = feature < end
            weight = up + (slot.to(tl.int64) * features + feature[None, :]) * RANK
            total = tl.zeros((LINES, FEATURES), dtype=tl.float32)
            for start in tl.static_range(0, RANK, RANKS):
                rank = start + tl.arange(0, RANKS)
                if RANK > RANKS:
                    values = _sum(of_line, is_there, lines, ranks, rank, up.dtype.element_ty, SHARES)
                weights = tl.load(weight + rank[:, None], mask=known[None, :], other=0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            place = y + line[:, None] * y_stride + feature[None, :]
            mask = is_there[:, None] & known[None, :]
            before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            tl.store(place, (before + total).to(y.dtype.element_ty), mask=mask)


class TritonLowRank(StackedFactors):
    """See LowRank. Ranks are filled up to a multiple of what tensor cores take."""

    def __init__(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape._replace(max_rank=padded_rank(shape.max_rank)), dtype, device)
        parts = [sum(shape.outputs[:count]) for count in range(len(shape.outputs) + 1)]
        self._parts = torch.tensor(parts, dtype=torch.int64, device=device)
        self._ranks = next(width for width in (_WIDEST, 32, _LINES) if self.shape.max_rank % width == 0)
        pieces = -(-shape.inputs // _INPUTS)
        self._share = max(_PIECES, -(-pieces // _MOST_SHARES)) * _INPUTS
        self._shares = -(-shape.inputs // self._share)

    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """See LowRank; x and y without gaps in a line."""
        shape, count = self.shape, x.shape[0]
        if not count:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        ranks, features, slots = self.down.shape[1], self.up.shape[1], shape.num_slots
        starts, order = lines.starts(slots), lines.sorted.indices
        low = torch.empty((self._shares, count, ranks), dtype=torch.float32, device=x.device)
        tiles, blocks = min(count, slots + count // _LINES), ranks // self._ranks
        sizes = {"SLOTS": triton.next_power_of_2(slots), "LINES": _LINES, "num_warps": 4, **early(x)}
        _shrink_kernel[(tiles, blocks * self._shares)](
            x, self.down, low, starts, order, count, ranks, shape.inputs, x.stride(0), self._share, blocks, slots,
            RANKS=self._ranks, INPUTS=_INPUTS, num_stages=3, **sizes,
        )  # fmt: skip
        at_once = _FEATURES if y.itemsize == 2 else _FEATURES // 2
        blocks = triton.cdiv(max(shape.outputs), at_once)
        turns = _TURNS if tiles * blocks * len(shape.outputs) > _MANY else 1
        blocks = triton.cdiv(blocks, turns)
        _expand_kernel[(tiles, blocks * len(shape.outputs))](
            y, low, self.up, starts, order, self._parts, count, ranks, features, y.stride(0), blocks, slots,
            FEATURES=at_once, TURNS=turns, RANK=shape.max_rank, RANKS=self._ranks, SHARES=self._shares,
            num_stages=2 if shape.max_rank == self._ranks else 1,  # where sums are read in each turn they fill memory
            **sizes,
        )  # fmt: skip


def padded_rank(rank: int) -> int:
    """What a slot takes of an adapter of `rank`."""
    return -(-rank // _LINES) * _LINES
