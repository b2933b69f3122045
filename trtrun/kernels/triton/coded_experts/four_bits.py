"""The product of pairs of tokens and experts with codes of 4 bits: whole numbers in groups (kernels/torch/integers.py),
or such with an exponent in blocks (kernels/torch/fp4.py).

Of whole numbers the matrix units sum up activations times codes less their zero point for the inputs that share a
scale; such sums, times the scale, are added up in float32, in the order of the inputs. Numbers with an exponent are
multiplied by the scale of their block, which rounds nothing in bfloat16, and are one chain of sums, which is multiplied
by the factor of the output feature. On compute capability 9.0 other kernels are faster (four_bits_stream.py), with the
same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import Activation
from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.torch.fp4 import FORMS, UNIT_EXPONENT
from trtrun.kernels.torch.integers import GROUP, TILE, UNITS
from trtrun.kernels.triton.early_launch import early, launch_next, wait_for_all
from trtrun.kernels.triton.expert_tiles import ExpertTiles, grid_of, tile_and_part
from trtrun.kernels.triton.matmul.int_matmul import read_codes, read_words

_TILE, _GROUP = tl.constexpr(TILE), tl.constexpr(GROUP)
_NO_ROW = tl.constexpr(-1)
_LEAST = tl.constexpr(2.0**UNIT_EXPONENT)

FEWEST_ROWS = 16
"""Of a tile of the general kernel."""


class Gate(NamedTuple):
    """What becomes of the first half of a product's features, which the second is multiplied with: see Activation."""

    activation: Activation
    limit: float


_HEIGHTS = {3: 8, 8: 16, 24: 32, 96: 64}
"""Rows of a tile, by the mean number of pairs of an expert up to which they are taken."""
MANY_ROWS = 128
"""Of a tile, for more pairs."""

FEW_PAIRS = 24
"""Pairs that have a tile each: widening an expert's codes twice takes longer than to sort."""


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile for so many pairs: an expert's are to fill one, which then is read once."""
    mean = num_pairs / num_experts
    return next((rows for most, rows in _HEIGHTS.items() if mean <= most), MANY_ROWS)


@triton.jit
def _numbers_of(half, which):
    """E2M1 numbers as float32: of halves of words, int32, and which of four codes each is."""
    moved = half << (which * 3)
    last = (half >> 9 & 6) | (half >> 13 & 1)
    rest = tl.where(which == 3, last, moved >> 6 & 7)
    # From 1 on they have float32's form with two bits of exponent and one of mantissa; below they are halves.
    normal = ((rest << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(rest < 2, rest.to(tl.float32) * 0.5, normal)
    is_negative = tl.where(which == 3, half >> 14, moved >> 15) & 1
    return tl.where(is_negative == 1, -number, number)


@triton.jit
def _read_numbers(words, at, SIZE: tl.constexpr):
    """Numbers of a tile for SIZE inputs, which are the `at`-th of all such: [64, SIZE] float32."""
    found, which = read_words(words, at, SIZE)
    which = tl.broadcast_to(which[None, :], (_TILE, SIZE // 2))
    return tl.join(_numbers_of(found & 0xFFFF, which), _numbers_of(found >> 16 & 0xFFFF, which)).reshape([_TILE, SIZE])


@triton.jit
def _product_kernel(
    x, words, scales, factor, bias, y, pairs, experts, features, inputs, tiles, groups,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
    UNIT: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's weight; `groups` are those of SIZE inputs that it has room for. Whole numbers have no
    SHIFT."""
    wait_for_all(EARLY)
    launch_next(EARLY)
    tile, part = tile_and_part(ROWS)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    kind: tl.constexpr = x.dtype.element_ty
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_pair = pair != _NO_ROW
    row = tl.where(is_pair, pair // CHOSEN, 0) * inputs
    within = tl.arange(0, _TILE)
    own = expert * tiles + part
    total = tl.zeros((_TILE, ROWS), dtype=tl.float32)
    for group in range(0, groups):
        at = own * groups + group
        number = group * SIZE + tl.arange(0, SIZE)
        values = tl.load(
            x + row[None, :] + number[:, None], mask=is_pair[None, :] & (number < inputs)[:, None], other=0.0
        )
        if SHIFT == 0:
            both = tl.load(scales + at * _TILE + within)
            scale = (both & 0xFFFF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
            zero = (both >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32) * (-1 / UNIT)
            codes = read_codes(words, at, SIZE)
            sums = tl.dot((codes.to(tl.float32) - zero[:, None]).to(kind), values)
            # Said out loud: a compiler may or may not make one of a product and a sum.
            total = tl.fma(sums, tl.broadcast_to(scale[:, None], (_TILE, ROWS)), total)
        else:
            in_group: tl.constexpr = _GROUP // SIZE
            place = (at // in_group * _TILE + within) * in_group + at % in_group
            bits = (tl.load(scales + place).to(tl.int32) << SHIFT) + OFFSET
            scale = (bits << 16).to(tl.float32, bitcast=True) * _LEAST
            total = tl.dot((_read_numbers(words, at, SIZE) * scale[:, None]).to(kind), values, total)
    feature = part * _TILE + within
    is_feature = feature < features
    if ADDS:
        added = tl.load(bias + expert * features + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    else:
        added = tl.zeros((_TILE, 1), dtype=tl.float32)
    added = tl.broadcast_to(added, (_TILE, ROWS))
    if SHIFT == 0:
        total += added
    else:
        of_feature = tl.load(factor + expert * features + feature, mask=is_feature, other=0.0)[:, None]
        total = tl.fma(total, tl.broadcast_to(of_feature, (_TILE, ROWS)), added)
    place = y + pair[None, :] * features + feature[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_pair[None, :] & is_feature[:, None])


def general_product(
    x: torch.Tensor, weight: ExpertCodes, bias: torch.Tensor | None, tiles: ExpertTiles, num_pairs: int, each: int
) -> torch.Tensor:
    """x [rows, inputs] of half precision, contiguous, of which each has so many pairs → [pairs, features].

    Args:
        x: the rows.
        weight: with "words" and "scales", or "words", "blocks" and "factor".
        bias: [experts, features] or None.
        tiles: of any number of rows from 16 on.
        num_pairs: of the tiles.
        each: pairs that a row of x has, one behind the other.
    """
    words, size = weight.tensors["words"], group_size(weight)
    scales = weight.tensors.get("scales", weight.tensors.get("blocks"))
    form = FORMS[size] if "blocks" in weight.tensors else None
    made = x.new_empty((num_pairs, weight.features))
    _product_kernel[grid_of(tiles, words.shape[1])](
        x, words, scales, weight.tensors.get("factor", scales), made if bias is None else bias, made, *tiles,
        weight.features, weight.inputs, words.shape[1], words.shape[2] * (GROUP // size),
        CHOSEN=each, ROWS=tiles.rows, SIZE=size,
        SHIFT=0 if form is None else form.shift, OFFSET=0 if form is None else form.offset,
        UNIT=UNITS[x.dtype], ADDS=bias is not None, num_warps=4, **early(x),
    )  # fmt: skip
    return made


def group_size(weight: ExpertCodes) -> int:
    """Inputs that share a scale."""
    if "blocks" in weight.tensors:
        return GROUP // weight.tensors["blocks"].shape[-1]
    return GROUP // (weight.tensors["scales"].shape[3] * 32 // TILE)
