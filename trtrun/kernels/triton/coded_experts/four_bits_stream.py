"""The product of pairs of tokens and experts with codes of 4 bits in Triton's Gluon: every weight in the registers of
the thread whose matrix units take it.

A program has 64 features of an expert and some pairs that chose it. Words of some groups of 128 inputs are on their way
to shared memory (four_bits_words.py) while others are widened, each by the thread that copied it. Bits are those of the
general kernel (four_bits.py): instructions of one warp and of four add inputs in one order, and neither tiles nor steps
change it. Many rows have a kernel of their own (four_bits_prompts.py).

It knows tensors; it does not know who takes it (coded_experts.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.torch.fp4 import FORMS
from trtrun.kernels.torch.integers import GROUP, TILE
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.coded_experts.four_bits import FEW_PAIRS, MANY_ROWS, Gate, group_size
from trtrun.kernels.triton.coded_experts.four_bits_features import read_ends, store
from trtrun.kernels.triton.coded_experts.four_bits_prompts import multiply_many
from trtrun.kernels.triton.coded_experts.four_bits_words import (
    ask,
    point_at_scales,
    point_at_words,
    take_scales,
    take_words,
    widen_fp4,
)
from trtrun.kernels.triton.expert_tiles import ExpertTiles, grid_of, tile_and_part
from trtrun.kernels.triton.fused import GATES
from trtrun.kernels.triton.int4_stream.words import LINE, factor_of, widen
from trtrun.kernels.triton.support import multiprocessors

_TILE, _GROUP, _WORDS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(TILE * GROUP // 8)


class Depth(NamedTuple):
    """How far a program reads ahead: so many `groups` of 128 inputs a step, and room for so many `steps`."""

    groups: int
    steps: int


DEPTHS = {8: Depth(2, 4), 16: Depth(1, 3), 32: Depth(1, 3), 64: Depth(1, 4)}
"""By the rows of a tile. Shared memory of a multiprocessor has room for four programs of the first two, six of the next
and two of the last. Bits are the same with any."""

FEW_PROGRAMS = {2: Depth(2, 7), 3: Depth(2, 5)}
"""Of tiles of 8 rows with up to so many programs for each multiprocessor, which all find room at once."""

_LINES = early_launch.FETCHED_BYTES // early_launch.LINE_BYTES
"""Of words, that programs of few pairs ask for before they wait."""

_launch_next, _wait_for_all, _ask_for, _tile_and_part = (
    gluon.jit(it.fn)
    for it in (early_launch.launch_next, early_launch.wait_for_all, early_launch.ask_for, tile_and_part)
)

_LINE_WORDS = gl.constexpr(32)
"""Of what memory is asked for at a time."""


@gluon.jit
def _multiply_whole(total, words, scales, values, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Sums of a group of whole numbers to those before, part by part."""
    kind: gl.constexpr = values.dtype
    weights = widen(words, scales, gl.DotOperandLayout(0, LAYOUT, 2), kind)
    theirs = values.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2))
    parts = _parts_of(theirs, LAYOUT, PARTS)
    for part in gl.static_range(PARTS):
        sums = mma_v2(weights[part], parts[part], gl.zeros(total.shape, gl.float32, layout=LAYOUT))
        factor = factor_of(scales[part], gl.SliceLayout(1, LAYOUT), kind).expand_dims(1)
        total = gl.fma(sums, factor.broadcast_to(total.shape), total)
    return total


@gluon.jit
def _multiply(
    total, words, scales, values, LAYOUT: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr
):
    """Sums of a group to those before."""
    if SHIFT == 0:
        return _multiply_whole(total, words, scales, values, LAYOUT, PARTS)
    else:
        weights = widen_fp4(words, scales, gl.DotOperandLayout(0, LAYOUT, 2), SHIFT, OFFSET)
        return mma_v2(weights, values.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2)), total)


@gluon.jit
def _parts_of(values, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Values [inputs, rows] in PARTS of as many inputs."""
    if PARTS == 1:
        return (gl.convert_layout(values, gl.DotOperandLayout(1, LAYOUT, 2)),)
    else:
        both = values.reshape([2, values.shape[0] // 2, values.shape[1]]).permute((1, 2, 0))
        lower, upper = gl.split(both)
        half: gl.constexpr = PARTS // 2
        return _parts_of(lower, LAYOUT, half) + _parts_of(upper, LAYOUT, half)


@gluon.jit(do_not_specialize=["features", "tiles", "groups"])
def _product_kernel(
    x, words, scales, factor, bias, y, pairs, experts, features, inputs, tiles, groups, num_experts,
    CHOSEN: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr,
    STEP: gl.constexpr, STEPS: gl.constexpr, ADDS: gl.constexpr, GATE: gl.constexpr, LIMIT: gl.constexpr,
    LINES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """64 features of an expert's weight, which has so many `tiles` of them; `groups` have 128 inputs. Whole numbers
    have no SHIFT. With a GATE they are gates of 32 features of y and their factors, and y is what comes of these.
    LINES of words are asked for beforehand, where the kernel before waited before it let this begin."""
    tile, part = _tile_and_part(ROWS)
    if LINES > 0 and EARLY:
        asked = gl.load(experts + tile, cache_modifier=".cg").to(gl.int64)
        if asked >= 0:
            begun = words + (gl.minimum(asked, num_experts - 1) * tiles + part) * groups * _WORDS
            line = gl.arange(0, LINES, layout=gl.BlockedLayout([1], [32], [4], [0]))
            _ask_for(begun + gl.minimum(line * _LINE_WORDS, groups * _WORDS - 1))
    _wait_for_all(EARLY)
    expert = gl.load(experts + tile).to(gl.int64)
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pairs += tile * ROWS
    pair = gl.load(pairs + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_rows))).to(gl.int64)
    if expert < 0:
        return
    is_gated: gl.constexpr = GATE >= 0
    kind: gl.constexpr = y.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    is_pair = pair >= 0
    within = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, of_rows))
    x = x + (gl.where(is_pair, pair // CHOSEN, 0) * inputs)[:, None] + within[None, :]
    first = expert * tiles * groups
    words = point_at_words(words + first * _WORDS, part, features, tiles, groups, is_gated, 1)
    scales = point_at_scales(scales + first * PARTS * _TILE, part, features, tiles, groups, is_gated, PARTS, SHIFT, 1)
    held = (
        gl.allocate_shared_memory(gl.int32, [STEPS * STEP, LINE, LINE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.int32, [STEPS * STEP * PARTS, _TILE], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(kind, [STEPS * STEP, ROWS, _GROUP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
    )
    total = gl.zeros([_TILE, ROWS], gl.float32, layout=layout)
    # Those of STEPS - 1 are asked for, and then one's place is free again when the one behind it is waited for.
    left, slot, free = groups, 0, (STEPS - 1) * STEP
    for step in gl.static_range(STEPS - 1):
        ask(held, (words, scales, x), is_pair, (left, inputs), step * STEP, STEP, PARTS, SHIFT)
        x, words, scales = x + STEP * _GROUP, words + STEP * _WORDS, scales + STEP * PARTS * _TILE
        left, inputs = left - STEP, inputs - STEP * _GROUP
    added, of_feature = read_ends(bias, factor, expert, part, features, layout, ADDS, SHIFT, is_gated, 1)
    for _ in range(0, groups, STEP):
        async_copy.wait_group(STEPS - 2)
        for group in gl.static_range(STEP):
            own_words, own_scales = take_words(held, slot + group), take_scales(held, (slot + group) * PARTS, PARTS)
            values = held[2].index(slot + group)
            total = _multiply(total, own_words, own_scales, values, layout, PARTS, SHIFT, OFFSET)
        if left <= 0:  # all has been asked for
            _launch_next(EARLY)
        ask(held, (words, scales, x), is_pair, (left, inputs), free, STEP, PARTS, SHIFT)
        free, slot = slot, gl.where(slot == (STEPS - 1) * STEP, 0, slot + STEP)
        x, words, scales = x + STEP * _GROUP, words + STEP * _WORDS, scales + STEP * PARTS * _TILE
        left, inputs = left - STEP, inputs - STEP * _GROUP
    async_copy.wait_group(0)
    added = added.to(gl.float32)[:, None].broadcast_to(total.shape)
    total = total + added if SHIFT == 0 else gl.fma(total, of_feature[:, None].broadcast_to(total.shape), added)
    store(total.to(kind), y, pairs, part, features, GATE, LIMIT, 1)


def streamed_product(
    x: torch.Tensor,
    weight: ExpertCodes,
    bias: torch.Tensor | None,
    tiles: ExpertTiles,
    num_pairs: int,
    each: int,
    gate: Gate | None = None,
    *,
    asks_ahead: bool = False,
) -> torch.Tensor:
    """Compute `general_product`, of rows that begin at multiples of 16 bytes in tiles of 8 to 128, to 64 of whole
    numbers with a scale for fewer than 128 inputs; numbers with an exponent times bfloat16 alone. With a gate the first
    half of the features is activated and multiplied with the second, as `activate_and_multiply` does: [pairs, features
    / 2]; half is a multiple of 16. Without a gate it may ask ahead, as PlainProduct does."""
    words, size, rows = weight.tensors["words"], group_size(weight), tiles.rows
    form = FORMS[size] if "blocks" in weight.tensors else None
    scales = weight.tensors["scales"] if form is None else weight.tensors["blocks"].view(torch.int32)
    features = weight.features if gate is None else weight.features // 2
    made = x.new_empty((num_pairs, features))
    tensors = (x, words, scales, weight.tensors.get("factor", scales), made if bias is None else bias, made)
    kinds: dict[str, Any] = {
        "CHOSEN": each, "ROWS": rows, "PARTS": GROUP // size if form is None else GROUP // size // 4,
        "SHIFT": 0 if form is None else form.shift, "OFFSET": 0 if form is None else form.offset,
        "ADDS": bias is not None, "GATE": -1 if gate is None else GATES[gate.activation],
        "LIMIT": math.inf if gate is None else gate.limit, **early_launch.early(x),
    }  # fmt: skip
    if rows == MANY_ROWS:
        multiply_many(tensors, tiles, features, weight.inputs, kinds)
        return made
    programs = words.shape[1] if gate is None else 2 * -(-features // TILE)
    depth = _depth(rows, len(tiles.experts) * programs, words.shape[2], words.device)
    _product_kernel[grid_of(tiles, programs)](
        *tensors, *tiles, features, weight.inputs, words.shape[1], words.shape[2], len(words),
        STEP=depth.groups, STEPS=depth.steps, LINES=_LINES if asks_ahead and num_pairs <= FEW_PAIRS else 0,
        num_warps=4, **kinds,
    )  # fmt: skip
    return made


def _depth(rows: int, programs: int, groups: int, device: torch.device) -> Depth:
    """How far each of so many programs reads ahead, of so many groups."""
    key = depth_key(rows, programs, device)
    depth = DEPTHS[rows] if key is None else FEW_PROGRAMS[key]
    return depth._replace(steps=min(depth.steps, -(-groups // depth.groups) + 1))


def depth_key(rows: int, programs: int, device: torch.device) -> int | None:
    """Where in FEW_PROGRAMS so many programs of so many rows are; None where they are in DEPTHS."""
    of_few = (most for most in FEW_PROGRAMS if rows == 8 and programs <= most * multiprocessors(device))
    return next(of_few, None)
