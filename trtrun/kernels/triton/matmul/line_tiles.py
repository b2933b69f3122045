"""Tiles of lines that have one adapter each, as a Triton kernel for CUDA: found once a forward, read by every layer.

There are as many tiles as slots and lines could need; those that are left over have no slot. Each program finds one,
by counting, so that nothing is sorted. It knows slots of lines. It does not know what is computed of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from trtrun.kernels.line_slots import LineSlots
from trtrun.kernels.triton.early_launch import begin, early

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
