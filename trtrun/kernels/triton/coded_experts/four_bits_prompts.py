"""The product of many pairs of tokens and experts with codes of 4 bits, as prompts bring them, in Triton's Gluon:
numbers with an exponent, or whole ones that have a scale for 128 inputs.

A program has 128 features of an expert and 128 of the pairs that chose it, or 64 where there are no more: groups of
four warps widen weights in the registers of the threads whose matrix units take them, and multiply them with rows in
shared memory. While these multiply one group of 128 inputs, the next one's weights are widened and others are on their
way. All features of some pairs are computed together, so that memory brings pairs and the expert once. Bits are those
of the general kernel (four_bits.py).

It knows tensors; it does not know who takes it (four_bits_stream.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trtrun.kernels.torch.integers import GROUP, TILE
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.coded_experts.four_bits import MANY_ROWS
from trtrun.kernels.triton.coded_experts.four_bits_features import read_ends, store
from trtrun.kernels.triton.coded_experts.four_bits_words import (
    ask,
    point_at_scales,
    point_at_words,
    take_scales,
    take_words,
    widen_fp4,
)
from trtrun.kernels.triton.expert_tiles import ExpertTiles, grid_of, tile_and_part
from trtrun.kernels.triton.int4_stream.words import LINE, factor_of, widen

_TILE, _GROUP, _WORDS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(TILE * GROUP // 8)


class Program(NamedTuple):
    """What a program has.

    Attributes:
        tiles: of 64 features, 1 or 2.
        few_steps, many_steps: groups of inputs that shared memory has room for, with half of a tile's pairs and with
            all: all but two are on their way while weights are widened, one is multiplied, and one was before it.
    """

    tiles: int
    few_steps: int
    many_steps: int


PROGRAMS = {MANY_ROWS: Program(2, 8, 5)}
"""By the rows of a tile of pairs. Bits are the same with any."""

_launch_next, _wait_for_all, _tile_and_part = (
    gluon.jit(it.fn) for it in (early_launch.launch_next, early_launch.wait_for_all, tile_and_part)
)


@gluon.jit
def _sum_numbers(
    total, held, sources, is_pair, left, groups,
    OPERAND: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """One chain of sums of numbers with an exponent over all groups."""
    words, scales, x = sources
    left, inputs = left
    slot, free = 0, STEPS - 2
    # There is one group at least, and the compiler is to know it: where a loop might be passed over, products wait for
    # each other (C7515 of ptxas).
    for _ in range(0, gl.maximum(groups, 1), 2):
        for _ in gl.static_range(2):  # so that weights of one group have other registers than those of the next
            async_copy.wait_group(STEPS - 3)
            fence_async_shared()
            weights = widen_fp4(take_words(held, slot), take_scales(held, slot * PARTS, PARTS), OPERAND, SHIFT, OFFSET)
            total = warpgroup_mma(weights, held[2].index(slot).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))  # for the group before
            # Where the group before that one was: all warps have waited for it before they last waited for each other.
            ask(held, (words, scales, x), is_pair, (left, inputs), free, 1, PARTS, SHIFT)
            free, slot = gl.where(free == STEPS - 1, 0, free + 1), gl.where(slot == STEPS - 1, 0, slot + 1)
            x, words, scales = x + _GROUP, words + _WORDS, scales + PARTS * _TILE
            left, inputs = left - 1, inputs - _GROUP
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _widen_whole(held, slot, OPERAND: gl.constexpr, KIND: gl.constexpr, STEPS: gl.constexpr):
    """Weights of a group that is there, and by what its sums are multiplied."""
    async_copy.wait_group(STEPS - 3)
    fence_async_shared()
    scales = take_scales(held, slot, 1)
    (weights,) = widen(take_words(held, slot), scales, OPERAND, KIND)
    return weights, factor_of(scales[0], gl.SliceLayout(1, OPERAND.parent), KIND).expand_dims(1)


@gluon.jit
def _sum_whole(
    total, held, sources, is_pair, left, groups, OPERAND: gl.constexpr, KIND: gl.constexpr, STEPS: gl.constexpr
):
    """Sums of all groups of whole numbers, each of which is multiplied by itself, added up in their order."""
    words, scales, x = sources
    left, inputs = left
    layout: gl.constexpr = total.type.layout
    nothing = gl.zeros(total.shape, gl.float32, layout=layout)
    slot, free = 0, STEPS - 2
    weights, factor = _widen_whole(held, slot, OPERAND, KIND, STEPS)
    sums = warpgroup_mma(weights, held[2].index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    for _ in range(1, groups, 2):
        for _ in gl.static_range(2):
            ask(held, (words, scales, x), is_pair, (left, inputs), free, 1, 1, 0)
            free, slot = gl.where(free == STEPS - 1, 0, free + 1), gl.where(slot == STEPS - 1, 0, slot + 1)
            x, words, scales = x + _GROUP, words + _WORDS, scales + _TILE
            left, inputs = left - 1, inputs - _GROUP
            weights, next_factor = _widen_whole(held, slot, OPERAND, KIND, STEPS)
            made = warpgroup_mma_wait(0, deps=(sums,))
            total = gl.fma(made, factor.broadcast_to(total.shape), total)
            factor = next_factor
            # Into the registers of `made`, which have been read by now: behind copies or zeros products wait, too.
            total = warpgroup_mma_wait(0, deps=(total,))
            sums = warpgroup_mma(weights, held[2].index(slot).permute((1, 0)), made, use_acc=False, is_async=True)
    made = warpgroup_mma_wait(0, deps=(sums,))
    return gl.fma(made, factor.broadcast_to(total.shape), total)


@gluon.jit
def _multiply_tile(
    x, words, scales, factor, bias, y, pairs, expert, part, features, inputs, tiles, groups,
    CHOSEN: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr,
    TILES: gl.constexpr, STEPS: gl.constexpr, ADDS: gl.constexpr, GATE: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Features of a program for the pairs at ROWS places."""
    is_gated: gl.constexpr = GATE >= 0
    kind: gl.constexpr = y.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * TILES, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4 * TILES, 1], [1, 0])
    pair = gl.load(pairs + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_rows))).to(gl.int64)
    is_pair = pair >= 0
    within = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, of_rows))
    x = x + (gl.where(is_pair, pair // CHOSEN, 0) * inputs)[:, None] + within[None, :]
    first = expert * tiles * groups
    words = point_at_words(words + first * _WORDS, part, features, tiles, groups, is_gated, TILES)
    scales = scales + first * PARTS * _TILE
    scales = point_at_scales(scales, part, features, tiles, groups, is_gated, PARTS, SHIFT, TILES)
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, _GROUP], kind)
    held = (
        gl.allocate_shared_memory(gl.int32, [STEPS, LINE * TILES, LINE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.int32, [STEPS * PARTS, _TILE * TILES], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(kind, [STEPS, ROWS, _GROUP], rows),
    )
    left = groups
    for step in gl.static_range(STEPS - 2):
        ask(held, (words, scales, x), is_pair, (left, inputs), step, 1, PARTS, SHIFT)
        x, words, scales = x + _GROUP, words + _WORDS, scales + PARTS * _TILE
        left, inputs = left - 1, inputs - _GROUP
    added, of_feature = read_ends(bias, factor, expert, part, features, layout, ADDS, SHIFT, is_gated, TILES)
    total = gl.zeros([_TILE * TILES, ROWS], gl.float32, layout=layout)
    sources = words, scales, x
    if SHIFT == 0:
        total = _sum_whole(total, held, sources, is_pair, (left, inputs), groups, operand, kind, STEPS)
    else:
        total = _sum_numbers(
            total, held, sources, is_pair, (left, inputs), groups, operand, PARTS, SHIFT, OFFSET, STEPS
        )
    async_copy.wait_group(0)
    added = added.to(gl.float32)[:, None].broadcast_to(total.shape)
    total = total + added if SHIFT == 0 else gl.fma(total, of_feature[:, None].broadcast_to(total.shape), added)
    store(total.to(kind), y, pairs, part, features, GATE, LIMIT, TILES)


@gluon.jit(do_not_specialize=["features", "tiles", "groups"])
def _many_rows_kernel(
    x, words, scales, factor, bias, y, pairs, experts, features, inputs, tiles, groups,
    CHOSEN: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr,
    TILES: gl.constexpr, FEW_STEPS: gl.constexpr, MANY_STEPS: gl.constexpr, ADDS: gl.constexpr, GATE: gl.constexpr,
    LIMIT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """TILES of an expert's weight, which has so many `tiles`, of 64 features; `groups` have 128 inputs. With a GATE
    half are gates and half their factors, and y is what comes of these."""
    _wait_for_all(EARLY)
    _launch_next(EARLY)
    tile, part = _tile_and_part(ROWS)
    expert = gl.load(experts + tile).to(gl.int64)
    if expert < 0:
        return
    pairs += tile * ROWS
    if gl.load(pairs + ROWS // 2) < 0:
        _multiply_tile(
            x, words, scales, factor, bias, y, pairs, expert, part, features, inputs, tiles, groups,
            CHOSEN, ROWS // 2, PARTS, SHIFT, OFFSET, TILES, FEW_STEPS, ADDS, GATE, LIMIT,
        )  # fmt: skip
    else:
        _multiply_tile(
            x, words, scales, factor, bias, y, pairs, expert, part, features, inputs, tiles, groups,
            CHOSEN, ROWS, PARTS, SHIFT, OFFSET, TILES, MANY_STEPS, ADDS, GATE, LIMIT,
        )  # fmt: skip


def multiply_many(
    tensors: Sequence[torch.Tensor], tiles: ExpertTiles, features: int, inputs: int, kinds: Mapping[str, Any]
) -> None:
    """Compute as `streamed_product`, whose arguments these are, in tiles of MANY_ROWS pairs.

    Args:
        tensors: x, words, scales, factor, bias, and what is made.
        tiles: of pairs.
        features: of what is made.
        inputs: of the weight.
        kinds: what the kernel is compiled for.
    """
    words, program = tensors[1], PROGRAMS[tiles.rows]
    of_weight = triton.cdiv(features, TILE) * (2 if kinds["GATE"] >= 0 else 1)
    _many_rows_kernel[grid_of(tiles, triton.cdiv(of_weight, program.tiles))](
        *tensors, *tiles, features, inputs, words.shape[1], words.shape[2],
        TILES=program.tiles, FEW_STEPS=program.few_steps, MANY_STEPS=program.many_steps,
        num_warps=4 * program.tiles, **kinds,
    )  # fmt: skip
