"""The product of pairs of tokens and experts with codes of 8 bits: E4M3, by output feature or in blocks of 128 by 128,
or whole numbers by output feature.

It does for each expert what matmul/fp8_matmul.py and fp8_block_matmul.py do for one weight: the same sums in the same
order, so that neither the tile nor the number of rows can be seen in a result. It knows tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import GROUP, Activations, RoundedRows, Rounding
from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.triton.early_launch import (
    early,
    last_asked,
    launch_next,
    launch_next_at,
    lines_of,
    wait_for_all,
)
from trtrun.kernels.triton.expert_tiles import (
    FEW_PAIRS,
    FEW_ROWS,
    ExpertTiles,
    fetch_of_expert,
    grid_of,
    has_no_more,
    tile_and_part,
)
from trtrun.kernels.triton.matmul.fp8_matmul import Tile
from trtrun.kernels.triton.support import shared_bytes

_PLAIN, _BY_ROW, _BY_GROUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_GROUP = tl.constexpr(GROUP)
_NO_ROW = tl.constexpr(-1)


@triton.jit
def _multiply(tensors, strides, pairs, expert, part, sizes, ROWS: tl.constexpr, KINDS: tl.constexpr):
    """The product of the pairs at ROWS places with a part of the features of their expert. The weight is the side of
    the matrix units that is 64 wide, so that there may be any number of rows."""
    x, x_scale, codes, scale, bias, y = tensors
    features, inputs = sizes
    x_stride, scale_stride = strides
    CHOSEN: tl.constexpr = KINDS[0]
    FEATURES: tl.constexpr = KINDS[1]
    INPUTS: tl.constexpr = KINDS[2]
    IS_EVEN: tl.constexpr = KINDS[3]
    ROUNDS: tl.constexpr = KINDS[4]
    ADDS: tl.constexpr = KINDS[5]
    STAGES: tl.constexpr = KINDS[6]
    EARLY: tl.constexpr = KINDS[7]
    FEW: tl.constexpr = KINDS[8]
    pair = tl.load(pairs + tl.arange(0, ROWS)).to(tl.int64)
    is_pair = pair != _NO_ROW
    row = tl.where(is_pair, pair // CHOSEN, 0)
    feature = part * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    # The last tile computes some features again instead of reading behind the expert.
    start = (expert * features + tl.where(is_feature, feature, 0)) * inputs
    groups = tl.cdiv(inputs, _GROUP)
    of_tile = scale + (expert * tl.cdiv(features, _GROUP) + part * FEATURES // _GROUP) * groups
    policy: tl.constexpr = "evict_first" if FEW else ""
    total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
    chosen = last_asked(inputs, INPUTS, STAGES)
    for first in range(0, inputs, INPUTS):
        if FEW:
            launch_next_at(first, chosen, EARLY)
        number = first + tl.arange(0, INPUTS)
        place = codes + start[:, None] + number[None, :]
        if IS_EVEN:
            weights = tl.load(place, eviction_policy=policy)
            values = tl.load(x + (row * x_stride)[None, :] + number[:, None], mask=is_pair[None, :], other=0.0)
        else:
            known = number < inputs
            weights = tl.load(place, mask=known[None, :], other=0.0, eviction_policy=policy)
            values = tl.load(
                x + (row * x_stride)[None, :] + number[:, None], mask=is_pair[None, :] & known[:, None], other=0.0
            )
        if ROUNDS == _BY_ROW:
            # Matrix units round sums of E4M3, so each group has a sum of its own. With max_num_imprecise_acc for that
            # products would wait for each other (C7514 of ptxas).
            tl.static_assert(INPUTS == _GROUP)
            total += tl.dot(weights, values)
        elif ROUNDS == _PLAIN:
            total = tl.dot(weights.to(x.dtype.element_ty), values, total)
        else:
            group = first // _GROUP
            factor = tl.load(of_tile + group) * tl.load(x_scale + group * scale_stride + row)
            # Said out loud: a compiler may or may not make one of a product and a sum.
            total = tl.fma(tl.dot(weights, values), tl.broadcast_to(factor[None, :], (FEATURES, ROWS)), total)
    if ADDS:
        added = tl.load(bias + expert * features + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    else:
        added = tl.zeros((FEATURES, 1), dtype=tl.float32)
    added = tl.broadcast_to(added, (FEATURES, ROWS))
    if ROUNDS == _BY_GROUP:
        total += added
    else:
        factor = tl.load(scale + expert * features + feature, mask=is_feature, other=0.0)[:, None]
        if ROUNDS == _BY_ROW:
            total *= factor
            factor = tl.load(x_scale + row)[None, :]
        total = tl.fma(total, tl.broadcast_to(factor, (FEATURES, ROWS)), added)
    place = y + pair[None, :] * features + feature[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_pair[None, :] & is_feature[:, None])


@triton.jit
def _product_kernel(
    x, x_scale, codes, scale, bias, y, pairs, experts, features, inputs, num_experts, x_stride, scale_stride,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    ROUNDS: tl.constexpr, ADDS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of the pairs of a tile with their expert. LINES as in experts.py."""
    tile, part = tile_and_part(ROWS)
    if EARLY and LINES > 0:
        fetch_of_expert(codes, experts + tile, num_experts, part * FEATURES, features, inputs, FEATURES, LINES)
    FEW: tl.constexpr = ROWS <= FEW_ROWS
    wait_for_all(EARLY)
    if not FEW:
        launch_next(EARLY)
    expert, own = tl.load(experts + tile).to(tl.int64), pairs + tile * ROWS
    if expert < 0:
        return
    tensors, strides, sizes = (x, x_scale, codes, scale, bias, y), (x_stride, scale_stride), (features, inputs)
    KINDS: tl.constexpr = (CHOSEN, FEATURES, INPUTS, IS_EVEN, ROUNDS, ADDS, STAGES, EARLY, FEW)
    if not FEW and has_no_more(own, ROWS // 4):
        _multiply(tensors, strides, own, expert, part, sizes, ROWS // 4, KINDS)
    elif not FEW and has_no_more(own, ROWS // 2):
        _multiply(tensors, strides, own, expert, part, sizes, ROWS // 2, KINDS)
    else:
        _multiply(tensors, strides, own, expert, part, sizes, ROWS, KINDS)


class ByteProduct:
    """The product with one matrix of all experts.

    Args:
        weight: with "codes", and "scale" or "block_scale".
        bias: [experts, features] in the dtype of activations, or None.
        asks_ahead: as of PlainProduct.

    Attributes:
        rounding: how rows must be rounded; None where they are taken as they are.
    """

    def __init__(self, weight: ExpertCodes, bias: torch.Tensor | None, *, asks_ahead: bool = False) -> None:
        self._asks_ahead = asks_ahead
        tensors, in_blocks = weight.tensors, "block_scale" in weight.tensors
        self._codes, self._bias = tensors["codes"], bias
        self._scale = tensors["block_scale"] if in_blocks else tensors["scale"]
        self.rounding: Rounding | None = "group" if in_blocks else "row" if weight.rounds_activations else None

    def tile_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Rows of a tile where there are so many pairs of a dtype."""
        rows = num_pairs // len(self._codes)
        return 16 if rows < 16 else 64 if rows < 96 else 128

    def __call__(self, x: Activations, tiles: ExpertTiles, num_pairs: int, each: int) -> torch.Tensor:
        """x [rows, inputs] of half precision, or rounded, of which each has so many pairs → [pairs, features]."""
        (num_experts, features, inputs), tile = self._codes.shape, self._tile(tiles.rows)
        asks = self._asks_ahead and num_pairs <= FEW_PAIRS
        values, x_scale = (x.codes, x.scale) if isinstance(x, RoundedRows) else (x, self._scale)
        made = torch.empty((num_pairs, features), dtype=x.dtype, device=values.device)
        how = {None: _PLAIN, "row": _BY_ROW, "group": _BY_GROUP}[self.rounding]
        _product_kernel[grid_of(tiles, triton.cdiv(features, tile.features))](
            values, x_scale, self._codes, self._scale, made if self._bias is None else self._bias, made, *tiles,
            features, inputs, num_experts, values.stride(0), x_scale.stride(-1),
            CHOSEN=each, ROWS=tile.rows, FEATURES=tile.features, INPUTS=tile.inputs,
            IS_EVEN=inputs % tile.inputs == 0, ROUNDS=how.value, ADDS=self._bias is not None,
            LINES=lines_of(self._codes[0], tile.features) if asks else 0, STAGES=tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **early(values),
        )  # fmt: skip
        return made

    def _tile(self, rows: int) -> Tile:
        """What is fast for tiles of so many rows, with as many stages as there is shared memory for. 64 features at
        least, what the matrix units take from four warps: narrower tiles would be computed by other instructions."""
        if rows == 128:
            tile = Tile(128, 64 if self.rounding == "group" else 128, 128, 4, 4 if self.rounding == "group" else 8)
        else:
            tile = Tile(rows, 64, 128, 6 if rows == 16 else 4)
        stage = (tile.features + tile.rows * (2 if self.rounding is None else 1)) * tile.inputs
        return tile._replace(num_stages=max(1, min(tile.num_stages, shared_bytes(self._codes.device) // stage)))
