"""What adapters add to a linear layer, as two Triton kernels for CUDA: lines of many adapters in one launch each.

A program has a tile of lines of one slot. Tiles are found once a forward, by counting, so that nothing is sorted, and
read by every layer: there are as many as slots and lines could need, and those that are left over end at once. The
first kernel multiplies with `down`, beside the layer's own product, the second with `up` and adds to the layer's result
(the shrink and expand of Punica, arXiv:2310.18547). The inputs are cut into shares, so that few lines keep more than a
few multiprocessors busy: how many follows from the layer's shape alone, and their sums add in order. A tile is always
as large, so that a line has the same bits in any company.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from typing_extensions import override

from trtrun.kernels.arguments import LineSlots
from trtrun.kernels.torch.cuda import beside
from trtrun.kernels.torch.low_rank import LowRankShape, StackedFactors
from trtrun.kernels.triton.early_launch import begin, early, lets_next_begin

_CHUNK = 128
"""Lines that a program looks at together."""


class LineTiles(NamedTuple):
    """Tiles of a forward's lines.

    Attributes:
        slots: [tiles] int32 on the device: the slot of a tile's lines, from 0; -1 where there are none.
        lines: [tiles, size] int32 there: the lines, in their order; -1 behind them.
    """

    slots: torch.Tensor
    lines: torch.Tensor


@triton.jit(do_not_specialize=["lines"])
def _tiles_kernel(
    slots, tile_slots, tile_lines, lines, num_slots,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The slot of one tile, and its lines."""
    begin(EARLY)
    tile = tl.program_id(0)
    number = tl.arange(0, SLOTS)
    counts = tl.zeros((SLOTS,), dtype=tl.int32)
    for start in range(0, lines, CHUNK):
        line = start + tl.arange(0, CHUNK)
        found = tl.load(slots + line, mask=line < lines, other=0).to(tl.int32)
        counts += tl.sum((found[None, :] == number[:, None] + 1).to(tl.int32), axis=1)
    counts = tl.where(number < num_slots, counts, 0)
    tiles = (counts + SIZE - 1) // SIZE
    slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)
    skipped = (tile - tl.sum(tl.where(number < slot, tiles, 0), axis=0)) * SIZE
    left = tl.sum(tl.where(number == slot, counts, 0), axis=0) - skipped
    place = tl.arange(0, SIZE)
    theirs = tl.zeros((SIZE,), dtype=tl.int32)
    before = -skipped
    for start in range(0, lines, CHUNK):
        line = start + tl.arange(0, CHUNK)
        is_theirs = tl.load(slots + line, mask=line < lines, other=0).to(tl.int32) == slot + 1
        at = before + tl.cumsum(is_theirs.to(tl.int32), 0) - 1
        is_here = is_theirs[None, :] & (at[None, :] == place[:, None])
        theirs += tl.sum(tl.where(is_here, line[None, :], 0), axis=1)
        before += tl.sum(is_theirs.to(tl.int32), axis=0)
    tl.store(tile_slots + tile, tl.where(slot < num_slots, slot, -1))
    tl.store(tile_lines + tile * SIZE + place, tl.where(place < left, theirs, -1))


def tiles_of(lines: LineSlots, num_slots: int, size: int) -> LineTiles:
    """Tiles of `size` lines, a power of two, of slots 1 to `num_slots`. There is a line at least."""
    return lines.once((num_slots, size), lambda slots: _find(slots, num_slots, size))


def _find(slots: torch.Tensor, num_slots: int, size: int) -> LineTiles:
    count = len(slots)
    tiles = min(count, num_slots + count // size)
    found = LineTiles(
        torch.empty(tiles, dtype=torch.int32, device=slots.device),
        torch.empty((tiles, size), dtype=torch.int32, device=slots.device),
    )
    _tiles_kernel[(tiles,)](
        slots, found.slots, found.lines, count, num_slots,
        SLOTS=triton.next_power_of_2(num_slots), SIZE=size, CHUNK=_CHUNK, num_warps=4, **early(slots),
    )  # fmt: skip
    return found


_LINES = 16
"""What a tile of the tensor cores takes."""
_INPUTS, _FEATURES = 128, 256
_PIECES, _MOST_SHARES = 4, 32
"""Pieces of the inputs in a share, and shares in all: so many steps of a program of the first kernel, and shares of a
wide layer."""
_ALIGNED = 8
"""Numbers of half precision in 16 bytes."""
_WIDEST = 64
"""Ranks that a program takes at once."""
_TURNS, _MANY = 2, 256
"""Tiles of features that a program of the second kernel has one after the other, where there are more than so many of
them: sums are read once for all, but each turn waits for memory. Fewer are all on a GPU at the same time, or nearly."""
_MANY_LINES = 256
"""From so many on a forward that is launched kernel by kernel has the branch, too: the host takes time to launch it."""


@triton.jit
def _tile(tile_slots, tile_lines, tile, LINES: tl.constexpr):
    """The lines [LINES] of a tile, which of them there are, and the slot that they have, from 0; below 0 for none."""
    # Volatile, so that the compiler leaves it before the branch on the slot, and both are waited for at once.
    line = tl.load(tile_lines + tile * LINES + tl.arange(0, LINES), volatile=True).to(tl.int64)
    return line, line >= 0, tl.load(tile_slots + tile)


@triton.jit(do_not_specialize=["lines"])
def _shrink_kernel(
    x, down, low, tile_slots, tile_lines, lines, ranks, inputs, x_stride, share, blocks,
    LINES: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """low[share, line] = x[line] @ down[slot of the line].T, over the inputs of a share."""
    begin(EARLY)
    line, is_there, slot = _tile(tile_slots, tile_lines, tl.program_id(0), LINES)
    if slot >= 0:
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
def _sum(of_line, is_there, lines, ranks, rank, kind: tl.constexpr, SHARES: tl.constexpr, IS_COMPILED: tl.constexpr):
    """Some ranks of what the first kernel made of a tile's lines, rounded."""
    values = tl.zeros((is_there.shape[0], rank.shape[0]), dtype=tl.float32)
    for share in tl.static_range(SHARES):
        values += tl.load(of_line + share * lines * ranks + rank[None, :], mask=is_there[:, None], other=0.0)
    if IS_COMPILED:
        # The compiler would take each share to where the product wants their sum, with two barriers for each.
        values = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [values], tl.float32, is_pure=False, pack=1)
    return values.to(kind)


@triton.jit(do_not_specialize=["lines"])
def _expand_kernel(
    y, low, up, tile_slots, tile_lines, parts, lines, ranks, features, y_stride, blocks,
    LINES: tl.constexpr, FEATURES: tl.constexpr, TURNS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr,
    ALIGNED: tl.constexpr, IS_COMPILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[line] += the sum of the shares of low[line] @ up[slot of the line].T, matrix by matrix."""
    begin(EARLY)
    line, is_there, slot = _tile(tile_slots, tile_lines, tl.program_id(0), LINES)
    matrix = tl.program_id(1) // blocks
    # All begin where that many numbers of a line may be read and written together.
    first = tl.multiple_of(tl.load(parts + matrix) + tl.program_id(1) % blocks * (FEATURES * TURNS), ALIGNED)
    end = tl.multiple_of(tl.load(parts + matrix + 1), ALIGNED)
    if (slot >= 0) & (first < end):
        # What takes long is asked for first: all of it is on its way together, and a program of one turn waits once.
        # Weights of float32 are asked for behind the sums, for which there would be no registers left.
        of_line = low + line[:, None] * ranks + matrix * RANK
        kind = up.dtype.element_ty
        if TURNS > 1 and RANK == RANKS:
            values = _sum(of_line, is_there, lines, ranks, tl.arange(0, RANKS), kind, SHARES, IS_COMPILED)
        for turn in range(TURNS):
            feature = first + turn * FEATURES + tl.arange(0, FEATURES)
            known = feature < end
            place = y + line[:, None] * y_stride + feature[None, :]
            mask = is_there[:, None] & known[None, :]
            before = tl.load(place, mask=mask, other=0.0)
            weight = up + (slot.to(tl.int64) * features + feature[None, :]) * RANK
            total = tl.zeros((LINES, FEATURES), dtype=tl.float32)
            for start in tl.static_range(0, RANK, RANKS):
                rank = start + tl.arange(0, RANKS)
                if kind == tl.float32 and (TURNS == 1 or RANK > RANKS):
                    values = _sum(of_line, is_there, lines, ranks, rank, kind, SHARES, IS_COMPILED)
                weights = tl.load(weight + rank[:, None], mask=known[None, :], other=0.0)
                if kind != tl.float32 and (TURNS == 1 or RANK > RANKS):
                    values = _sum(of_line, is_there, lines, ranks, rank, kind, SHARES, IS_COMPILED)
                total = tl.dot(values, weights, total, input_precision="ieee")
            tl.store(place, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)


class TritonLowRank(StackedFactors):
    """The `LowRank` of GPUs with Triton. Ranks are filled up to a multiple of what tensor cores take."""

    def __init__(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape._replace(max_rank=padded_rank(shape.max_rank)), dtype, device)
        parts = [sum(shape.outputs[:count]) for count in range(len(shape.outputs) + 1)]
        self._parts = torch.tensor(parts, dtype=torch.int64, device=device)
        self._ranks = next(width for width in (_WIDEST, 32, _LINES) if self.shape.max_rank % width == 0)
        pieces = -(-shape.inputs // _INPUTS)
        self._share = max(_PIECES, -(-pieces // _MOST_SHARES)) * _INPUTS
        self._shares = -(-shape.inputs // self._share)

    @override
    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """Add to y what the lines' adapters make of x; y has no gaps in a line."""
        if len(x):
            low, tiles, x = self._room(x), self._tiles(lines), _without_gaps(x)
            self._shrink(low, x, tiles, early(x))
            self._expand(y, low, tiles, early(y))

    @override
    def add_to(
        self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, lines: LineSlots
    ) -> torch.Tensor:
        """Multiply and add; the first kernel needs x alone, so that it may run beside the layer's product."""
        if not len(x):
            return super().add_to(product, x, lines)
        # All that the branch reads and writes is there before it begins, and stays until it has ended (`beside`).
        low, tiles, x = self._room(x), self._tiles(lines), _without_gaps(x)
        shrink = partial(self._shrink, low, x, tiles, lets_next_begin(x))
        if _branches(x):
            with beside(shrink, x.device):
                y = product(x)
        else:
            shrink()
            y = product(x)
        self._expand(y, low, tiles, lets_next_begin(y))
        return y

    def _tiles(self, lines: LineSlots) -> LineTiles:
        return tiles_of(lines, self.shape.num_slots, _LINES)

    def _room(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for what the first kernel makes: [shares, lines, ranks of all matrices] float32."""
        return torch.empty((self._shares, len(x), self.down.shape[1]), dtype=torch.float32, device=x.device)

    def _shrink(self, low: torch.Tensor, x: torch.Tensor, tiles: LineTiles, options: dict[str, Any]) -> None:
        ranks = self.down.shape[1]
        blocks = ranks // self._ranks
        _shrink_kernel[(len(tiles.slots), blocks * self._shares)](
            x, self.down, low, *tiles, len(x), ranks, self.shape.inputs, x.stride(0), self._share, blocks,
            LINES=_LINES, RANKS=self._ranks, INPUTS=_INPUTS, num_warps=2, num_stages=3, **options,
        )  # fmt: skip

    def _expand(self, y: torch.Tensor, low: torch.Tensor, tiles: LineTiles, options: dict[str, Any]) -> None:
        shape, count = self.shape, len(tiles.slots)
        at_once = _FEATURES if y.itemsize == 2 else _FEATURES // 2
        blocks = triton.cdiv(max(shape.outputs), at_once)
        turns = _TURNS if count * blocks * len(shape.outputs) > _MANY else 1
        blocks = triton.cdiv(blocks, turns)
        _expand_kernel[(count, blocks * len(shape.outputs))](
            y, low, self.up, *tiles, self._parts, len(y), low.shape[2], self.up.shape[1], y.stride(0), blocks,
            LINES=_LINES, FEATURES=at_once, TURNS=turns, RANK=shape.max_rank, RANKS=self._ranks, SHARES=self._shares,
            ALIGNED=math.gcd(_ALIGNED, *shape.outputs), IS_COMPILED=y.is_cuda, num_warps=4,
            num_stages=2 if shape.max_rank == self._ranks else 1,  # where sums are read in each turn they fill memory
            **options,
        )  # fmt: skip


def _branches(x: torch.Tensor) -> bool:
    """Whether a branch is worth it: the host takes longer to launch one than few lines take to compute, but for graphs,
    for which it is done once. Kernels are compiled alike for both, as what is captured has run before."""
    return x.is_cuda and (len(x) >= _MANY_LINES or torch.cuda.is_current_stream_capturing())


def _without_gaps(x: torch.Tensor) -> torch.Tensor:
    """Lines whose numbers lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def padded_rank(rank: int) -> int:
    """What a slot takes of an adapter of `rank`."""
    return -(-rank // _LINES) * _LINES
