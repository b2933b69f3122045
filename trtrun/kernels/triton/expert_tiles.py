"""Pairs of a token and an expert that it chose, sorted by expert into tiles of rows, on the device alone: for so many
pairs there are so many tiles, of which some are empty.

It knows what was chosen. It does not know what tiles are multiplied with.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early, fetch

FEW_PAIRS = 64
"""Pairs that have a tile each: an expert that several tokens chose is read by several programs, from the cache."""

_MOST_AT_ONCE = 4096
"""Pairs that a program looks at."""

_STEPS = 16
"""Whose counts a program adds up together."""

FEW_ROWS = tl.constexpr(16)
"""Rows of the smallest tiles. Several that chose an expert are multiplied with the same features of it together, and
these are read once. Larger tiles have all of their features together: so the rows are read once, and so is the expert,
of which the next tile is, too."""


class ExpertTiles(NamedTuple):
    """Tiles of pairs.

    Attributes:
        pairs: [tiles * rows] int64: pair token * chosen + place, or -1; of empty tiles they have no meaning.
        experts: [tiles] int64: of each tile, or -1 where it is empty.
    """

    pairs: torch.Tensor
    experts: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return len(self.pairs) // len(self.experts)


@triton.jit
def _counts_of(expert_of, BINS: tl.constexpr):
    """Pairs of each expert, of some pairs. The last bin is nobody's: so are pairs whose expert another rank holds."""
    return tl.histogram(tl.where(expert_of < 0, BINS - 1, expert_of.to(tl.int32)), BINS)


@triton.jit
def _count_kernel(chosen, counts, num_pairs, STEP: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr):
    """Counts [steps, BINS] of the pairs of each step."""
    begin(EARLY)
    number = tl.program_id(0) * STEP + tl.arange(0, STEP)
    found = _counts_of(tl.load(chosen + number, mask=number < num_pairs, other=-1), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit
def _lay_out_kernel(
    chosen, counts, pairs, experts, num_pairs, num_tiles, num_experts, num_steps,
    ROWS: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each expert and each step of pairs, and those behind them for the tiles that are left. Each knows
    where its pairs go from the counts, so that none waits for another; pairs of an expert keep their order. Where there
    is one step, it counts itself. STEPS are added up together."""
    begin(EARLY)
    expert, step = tl.program_id(0), tl.program_id(1)
    bins = tl.arange(0, BINS)
    number = step * STEP + tl.arange(0, STEP)
    expert_of = tl.load(chosen + number, mask=number < num_pairs, other=-1)
    before = tl.zeros((BINS,), tl.int32)
    if STEPS == 1:
        counted = _counts_of(expert_of, BINS)
    else:
        counted = tl.zeros((BINS,), tl.int32)
        for first in range(0, num_steps, STEPS):
            which = (first + tl.arange(0, STEPS))[:, None]
            found = tl.load(counts + which * BINS + bins[None, :], mask=which < num_steps, other=0)
            counted += tl.sum(found, axis=0)
            before += tl.sum(tl.where(which < step, found, 0), axis=0)
    tiles = (counted + ROWS - 1) // ROWS
    start = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    if expert == num_experts:
        for first in range(start + step * STEP, num_tiles, num_steps * STEP):
            tile = first + tl.arange(0, STEP)
            tl.store(experts + tile, tl.full((STEP,), -1, tl.int64), mask=tile < num_tiles)
        return
    first_place = pairs + start.to(tl.int64) * ROWS
    is_own = expert_of == expert
    placed = tl.sum(tl.where(bins == expert, before, 0), axis=0)
    rank = placed + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    tl.store(first_place + rank, number.to(tl.int64), mask=is_own)
    if step == 0:
        own = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
        behind = tl.sum(tl.where(bins == expert, counted, 0), axis=0) + tl.arange(0, ROWS)
        tl.store(first_place + behind, tl.full((ROWS,), -1, tl.int64), mask=behind < own * ROWS)
        for first in range(0, own, ROWS):
            tile = first + tl.arange(0, ROWS)
            tl.store(experts + start + tile, tl.zeros((ROWS,), tl.int64) + expert, mask=tile < own)


@triton.jit
def has_no_more(pairs, ROWS: tl.constexpr):
    """Whether a tile has pairs at its first ROWS places alone. Each expert's last tile has few, as often as not: what
    computes fewer places of it is done sooner."""
    return tl.load(pairs + ROWS) < 0


@triton.jit
def tile_and_part(ROWS: tl.constexpr):
    """Which tile is this program's, and which part of its features, in a grid of `grid_of`."""
    if ROWS > FEW_ROWS:
        return tl.program_id(1), tl.program_id(0)
    else:
        return tl.program_id(0), tl.program_id(1)


@triton.jit
def fetch_of_expert(
    weight, expert, num_experts, first, features, inputs,
    FEATURES: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Ask for FEATURES rows of an expert's weight [features, inputs], from the `first` on, before `wait_for_all`. Which
    expert it is, or -1 for none, stands at the place `expert`, past the own cache, if what was written before the
    kernel in front is there; where it is not, other rows are asked for."""
    asked = tl.load(expert, cache_modifier=".cg").to(tl.int64)
    if asked >= 0:
        begun = tl.minimum(first + tl.arange(0, FEATURES), features - 1)
        fetch(weight, (tl.minimum(asked, num_experts - 1) * features + begun) * inputs, inputs, LINES, True)


def grid_of(tiles: ExpertTiles, parts: int) -> tuple[int, int]:
    """A program for each tile and each part of its features, in the order in which these come."""
    return (parts, len(tiles.experts)) if tiles.rows > FEW_ROWS.value else (len(tiles.experts), parts)


@cache
def _apart(num_pairs: int, rows: int, device: torch.device) -> torch.Tensor:
    """Pairs of tiles that have one each."""
    pairs = torch.full((num_pairs, rows), -1, dtype=torch.int64, device=device)
    pairs[:, 0] = torch.arange(num_pairs, device=device)
    return pairs.flatten()


def lay_out(experts: torch.Tensor, num_experts: int, rows: int, few: int | None = None) -> ExpertTiles:
    """Sort pairs into tiles of so many rows, a power of two: experts [tokens, chosen] int64; pairs of -1 are in no
    tile. Up to `few` pairs have a tile each, FEW_PAIRS where it is not said."""
    flat, device = experts.contiguous().flatten(), experts.device
    num_pairs = len(flat)
    if num_pairs <= (FEW_PAIRS if few is None else few):
        return ExpertTiles(_apart(num_pairs, rows, device), flat)
    num_tiles = -(-num_pairs // rows) + min(num_experts, num_pairs)
    pairs = torch.empty(num_tiles * rows, dtype=torch.int64, device=device)
    of_tile = torch.empty(num_tiles, dtype=torch.int64, device=device)
    step = min(_MOST_AT_ONCE, triton.next_power_of_2(num_pairs))
    bins, num_steps = triton.next_power_of_2(num_experts + 1), triton.cdiv(num_pairs, step)
    shape: dict[str, Any] = {"STEP": step, "BINS": bins, "num_warps": 4 if step <= 1024 else 8, **early(experts)}
    counts = pairs
    if num_steps > 1:
        counts = torch.empty(num_steps * bins, dtype=torch.int32, device=device)
        _count_kernel[(num_steps,)](flat, counts, num_pairs, **shape)
    _lay_out_kernel[(num_experts + 1, num_steps)](
        flat, counts, pairs, of_tile, num_pairs, num_tiles, num_experts, num_steps,
        ROWS=rows, STEPS=1 if num_steps == 1 else _STEPS, **shape,
    )  # fmt: skip
    return ExpertTiles(pairs, of_tile)
