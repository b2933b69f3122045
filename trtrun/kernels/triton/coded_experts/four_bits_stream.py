"""The product of pairs of tokens and experts with codes of 4 bits in Triton's Gluon: every weight in the registers of
the thread whose matrix units take it.

A program has 64 features of an expert and some pairs that chose it. Each thread reads words of its own weights, four
groups of 128 inputs ahead of those that it widens, so nothing is waited for and nothing changes threads; activations
alone go through shared memory. Bits are those of the general kernel (four_bits.py): instructions of one warp and of
four add inputs in one order.

It knows tensors; it does not know who takes it (coded_experts.py).
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.torch.fp4 import FORMS
from trtrun.kernels.torch.integers import GROUP, TILE
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.coded_experts.four_bits import Gate, group_size
from trtrun.kernels.triton.expert_tiles import ExpertTiles
from trtrun.kernels.triton.fused import GATES, gated
from trtrun.kernels.triton.int4_stream.words import LINE, as_operand, factor_of, split_words, widen
from trtrun.kernels.triton.support import multiprocessors

_TILE, _GROUP, _WORDS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(TILE * GROUP // 8)
_AT_ONCE, _AT_ONCE_OF_WHOLE = {8: 4, 16: 4, 32: 2, 64: 2, 128: 1}, {8: 4, 16: 2, 32: 2, 64: 1}
"""Groups that are on their way, by rows of a tile, and those of whole numbers, which take more registers."""

_BY_FOUR_WARPS = gl.constexpr(64)
"""Rows from which on four warps multiply numbers with an exponent together: instructions of one warp are slower."""

_FEW_PROGRAMS, _AT_ONCE_OF_FEW, _REGISTERS_OF_FEW = 3, 8, 168
"""Up to so many programs of 8 rows for each multiprocessor there are registers for more groups."""

_REGISTERS = {8: 128, 16: 128, 32: 168}
"""Of a thread, by rows of a tile: four or three programs find room on a multiprocessor."""

_launch_next, _wait_for_all, _gated = (
    gluon.jit(it.fn) for it in (early_launch.launch_next, early_launch.wait_for_all, gated)
)


@gluon.constexpr_function
def _layout_of_words():
    """Layout of [32, 32] words: each has the thread that has its weights."""
    lanes, warps = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0]], lanes, warps, [], [LINE.value, LINE.value])


@gluon.constexpr_function
def _layout_of_features():
    """Layout of [64] features, as the matrix units take them."""
    return gl.DistributedLinearLayout([[8]], [[0], [0], [1], [2], [4]], [[16], [32]], [], [_TILE.value])


@gluon.constexpr_function
def _layout_of_sums(rows, by_four_warps):
    """Layout of [64, rows] sums."""
    instruction = [16, rows, 16] if by_four_warps else [16, 8]
    return gl.NVMMADistributedLayout([3, 0] if by_four_warps else [2, 0], [4, 1], instruction)


@gluon.constexpr_function
def _layout_of_values(rows, kind, by_four_warps):
    """Layout of [rows, 128] activations in shared memory."""
    if by_four_warps:
        return gl.NVMMASharedLayout.get_default_for([rows, _GROUP.value], kind)
    return gl.SwizzledSharedLayout(8, 1, 8, [1, 0])


@gluon.constexpr_function
def _take_code(place):
    """Code of each half of a word, the `place`-th of four, as a bfloat16 times another: its sign is the highest bit,
    the others are the lowest of the exponent and the highest of the mantissa (fp4.spread_bits)."""
    if place < 3:
        take = f"shl.b32 s, $1, {3 * place}; and.b32 s, s, 0x81C081C0;"
    else:
        take = (
            "shl.b32 s, $1, 1; and.b32 s, s, 0x80008000; shr.u32 r, $1, 3; and.b32 r, r, 0x01800180; or.b32 s, s, r; "
            "shr.u32 r, $1, 7; and.b32 r, r, 0x00400040; or.b32 s, s, r;"
        )
    return f"{{.reg .b32 s, r, m; {take} mov.b32 m, 0x80008000; fma.rn.bf16x2 $0, s, $2, m;}}"


@gluon.constexpr_function
def _take_scale(place, shift, offset):
    """Byte of a word as two equal numbers of bfloat16."""
    return (
        f"{{.reg .b32 t; prmt.b32 t, $1, 0, {0x4040 + 0x101 * place}; shl.b32 t, t, {shift}; "
        f"add.u32 $0, t, {offset * 0x10001};}}"
    )


@gluon.jit
def _scale_of(words, block, PLACE: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Scales of a block, of the words of a group, for pairs of numbers [64, 8]."""
    word = gl.convert_layout(words[block // 4], gl.SliceLayout(1, PLACE))
    pairs = gl.inline_asm_elementwise(
        _take_scale(block % 4, SHIFT, OFFSET), "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )
    return pairs.expand_dims(1).broadcast_to([_TILE, 8])


@gluon.jit
def _two(words, scales, FIRST: gl.constexpr, SLICE: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Pairs of numbers for the SLICE-th 16 inputs of a group and those behind, which are the FIRST-th codes and the
    next of words: [64, 8, 2]."""
    place: gl.constexpr = words.type.layout
    blocks: gl.constexpr = len(scales) * 4
    of_one = _scale_of(scales, SLICE * blocks // 8, place, SHIFT, OFFSET)
    of_other = _scale_of(scales, (SLICE + 1) * blocks // 8, place, SHIFT, OFFSET)
    one = gl.inline_asm_elementwise(_take_code(FIRST), "=r,r,r", [words, of_one], dtype=gl.int32, is_pure=True, pack=1)
    other = gl.inline_asm_elementwise(
        _take_code(FIRST + 1), "=r,r,r", [words, of_other], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.join(one, other)


@gluon.jit
def _widen_fp4(words, scales, OPERAND: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr):
    """Words of a group and the words of its scales → numbers times scales [64, 128], as the matrix units take them."""
    low, high = split_words(words)
    first, second = _two(low, scales, 0, 0, SHIFT, OFFSET), _two(low, scales, 2, 2, SHIFT, OFFSET)
    third, fourth = _two(high, scales, 0, 4, SHIFT, OFFSET), _two(high, scales, 2, 6, SHIFT, OFFSET)
    pairs = gl.join(gl.join(first, second), gl.join(third, fourth)).permute((0, 4, 3, 2, 1))
    return as_operand(pairs.reshape([_TILE, 64]), OPERAND, gl.bfloat16)


@gluon.jit
def _read_words(words, left, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Words of COUNT groups from the FIRST-th behind `words` on, zeros where fewer are left."""
    if COUNT > 1:
        half: gl.constexpr = COUNT // 2
        return _read_words(words, left, FIRST, half) + _read_words(words, left, FIRST + half, half)
    else:
        known = gl.full([LINE, LINE], left > FIRST, gl.int1, layout=words.type.layout)
        return (gl.load(words + FIRST * _WORDS, mask=known, other=0, eviction_policy="evict_first"),)


@gluon.jit
def _read_scales(
    scales, left, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr
):  # fmt: skip
    """The words of scales of COUNT groups, PARTS [64] each; as `_read_words`."""
    if COUNT > 1:
        half: gl.constexpr = COUNT // 2
        rest = _read_scales(scales, left, FIRST + half, half, PARTS, SHIFT)
        return _read_scales(scales, left, FIRST, half, PARTS, SHIFT) + rest
    else:
        known = gl.full([_TILE], left > FIRST, gl.int1, layout=scales.type.layout)
        return (_read_parts(scales + FIRST * PARTS * _TILE, known, 0, PARTS, SHIFT),)


@gluon.jit
def _read_parts(scales, known, FIRST: gl.constexpr, COUNT: gl.constexpr, SHIFT: gl.constexpr):
    """COUNT of the words of a group's scales: of whole numbers they lie part by part."""
    if COUNT > 1:
        half: gl.constexpr = COUNT // 2
        rest = _read_parts(scales, known, FIRST + half, half, SHIFT)
        return _read_parts(scales, known, FIRST, half, SHIFT) + rest
    else:
        place = scales + (FIRST * _TILE if SHIFT == 0 else FIRST)
        return (gl.load(place, mask=known, other=0, eviction_policy="evict_first"),)


@gluon.jit
def _read_rows(x, left, is_pair, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Activations for COUNT groups from the FIRST-th behind x on, [rows, 128] each, of which so many inputs are left;
    zeros behind them."""
    if COUNT > 1:
        half: gl.constexpr = COUNT // 2
        rest = _read_rows(x, left, is_pair, FIRST + half, half)
        return _read_rows(x, left, is_pair, FIRST, half) + rest
    else:
        number = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, x.type.layout))
        known = is_pair[:, None] & (number < left - FIRST * _GROUP)[None, :]
        return (gl.load(x + FIRST * _GROUP, mask=known, other=0.0),)


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
        weights = _widen_fp4(words, scales, gl.DotOperandLayout(0, LAYOUT, 2), SHIFT, OFFSET)
        theirs = values.permute((1, 0))
        if total.shape[1] < _BY_FOUR_WARPS:
            return mma_v2(weights, theirs.load(gl.DotOperandLayout(1, LAYOUT, 2)), total)
        else:
            return warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, theirs, total, is_async=True),))


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


@gluon.jit
def _keep_in_order():
    """Have what was asked for in front of it asked for there: the assembler moves reads of the next step behind all of
    this one, and then there is nothing on its way while this one is multiplied."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _feature_of(index, features, GATED: gl.constexpr):
    """Features of y that a program has, by their `index` among its 64 of the weight, and features of the weight. With
    gates those whose index has bit 3 are factors, which lie as many as `features` behind their gates."""
    if GATED:
        own = gl.program_id(1) // 2 * _TILE + index // 16 * 16 + gl.program_id(1) % 2 * 8 + index % 8
        return own, own + index // 8 % 2 * features
    else:
        own = gl.program_id(1) * _TILE + index
        return own, own


@gluon.jit
def _source_of(index, features, tiles, GATED: gl.constexpr):
    """The tile of the weight in which features are read, and which of its 64 they are."""
    _, feature = _feature_of(index, features, GATED)
    # Behind the last tile there is nothing, and nobody asks for what comes of it.
    return gl.where(feature < tiles * _TILE, feature // _TILE, 0), feature % _TILE


@gluon.jit
def _point_at_words(words, features, tiles, groups, GATED: gl.constexpr):
    """Where the first group's words of each thread are, [32, 32], of an expert's: see integers.words_shape."""
    layout: gl.constexpr = _layout_of_words()
    line = gl.arange(0, LINE, layout=gl.SliceLayout(1, layout))
    within = gl.arange(0, LINE, layout=gl.SliceLayout(0, layout))
    tile, feature = _source_of(line // 4 % 4 * 16 + line // 16 * 8 + line % 4 * 2, features, tiles, GATED)
    own_line = feature // 8 % 2 * 16 + feature // 16 * 4 + feature % 8 // 2
    return words + (tile * groups * _WORDS + own_line * LINE)[:, None] + within[None, :]


@gluon.jit
def _point_at_scales(scales, features, tiles, groups, GATED: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr):
    """Where the first group's scales of each thread are, [64], of an expert's."""
    index = gl.arange(0, _TILE, layout=_layout_of_features())
    tile, feature = _source_of(index, features, tiles, GATED)
    stride: gl.constexpr = 1 if SHIFT == 0 else PARTS
    return scales + tile * groups * PARTS * _TILE + feature * stride


@gluon.jit(do_not_specialize=["features", "tiles", "groups"])
def _product_kernel(
    x, words, scales, factor, bias, y, pairs, experts, features, inputs, tiles, groups,
    CHOSEN: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SHIFT: gl.constexpr, OFFSET: gl.constexpr,
    AT_ONCE: gl.constexpr, ADDS: gl.constexpr, GATE: gl.constexpr, LIMIT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """64 features of an expert's weight, which has so many `tiles` of them; `groups` have 128 inputs. Whole numbers
    have no SHIFT. With a GATE they are gates of 32 features of y and their factors, and y is what comes of these."""
    _launch_next(EARLY)
    _wait_for_all(EARLY)
    expert = gl.load(experts + gl.program_id(0)).to(gl.int64)
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_rows))
    pair = gl.load(pairs + gl.program_id(0) * ROWS + row).to(gl.int64)
    if expert < 0:
        return
    by_four_warps: gl.constexpr = SHIFT > 0 and ROWS >= _BY_FOUR_WARPS
    layout: gl.constexpr = _layout_of_sums(ROWS, by_four_warps)
    is_gated: gl.constexpr = GATE >= 0
    is_pair = pair >= 0
    within = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, of_rows))
    x = x + (gl.where(is_pair, pair // CHOSEN, 0) * inputs)[:, None] + within[None, :]
    first = expert * tiles * groups
    words = _point_at_words(words + first * _WORDS, features, tiles, groups, is_gated)
    scales = _point_at_scales(scales + first * PARTS * _TILE, features, tiles, groups, is_gated, PARTS, SHIFT)
    own_words = _read_words(words, groups, 0, AT_ONCE)
    own_scales = _read_scales(scales, groups, 0, AT_ONCE, PARTS, SHIFT)
    own_rows = _read_rows(x, inputs, is_pair, 0, AT_ONCE)
    added, of_feature = _read_ends(bias, factor, expert, features, layout, ADDS, SHIFT, is_gated)
    values = gl.allocate_shared_memory(
        y.dtype.element_ty, [AT_ONCE, ROWS, _GROUP], _layout_of_values(ROWS, y.dtype.element_ty, by_four_warps)
    )
    total = gl.zeros([_TILE, ROWS], gl.float32, layout=layout)
    for first in range(0, groups, AT_ONCE):
        for group in gl.static_range(AT_ONCE):
            values.index(group).store(own_rows[group])
        if by_four_warps:
            fence_async_shared()
        own_rows = _read_rows(x, inputs - first * _GROUP, is_pair, AT_ONCE, AT_ONCE)
        next_words, next_scales = (), ()
        for group in gl.static_range(AT_ONCE):
            total = _multiply(
                total, own_words[group], own_scales[group], values.index(group), layout, PARTS, SHIFT, OFFSET
            )
            # In the place of what is used up: so many groups are always on their way.
            next_words += _read_words(words, groups - first, AT_ONCE + group, 1)
            next_scales += _read_scales(scales, groups - first, AT_ONCE + group, 1, PARTS, SHIFT)
            _keep_in_order()
        own_words, own_scales = next_words, next_scales
        x += AT_ONCE * _GROUP
        words += AT_ONCE * _WORDS
        scales += AT_ONCE * PARTS * _TILE
    if SHIFT == 0:
        total += added[:, None].broadcast_to(total.shape)
    else:
        total = gl.fma(
            total, of_feature[:, None].broadcast_to(total.shape), added[:, None].broadcast_to(total.shape)
        )  # fmt: skip
    _store(total.to(y.dtype.element_ty), y, pairs, features, GATE, LIMIT)


@gluon.jit
def _read_ends(
    bias, factor, expert, features, LAYOUT: gl.constexpr, ADDS: gl.constexpr, SHIFT: gl.constexpr, GATED: gl.constexpr
):
    """What is added to sums of a program's features, and what numbers with an exponent are multiplied by before: [64]
    float32 each. Read in front of the sums, so that nothing waits for it behind them."""
    place: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    own, feature = _feature_of(gl.arange(0, _TILE, layout=place), features, GATED)
    of_weight = features * 2 if GATED else features
    added = gl.zeros([_TILE], gl.float32, layout=place)
    of_feature = added
    if ADDS:
        added = gl.load(bias + expert * of_weight + feature, mask=own < features, other=0.0).to(gl.float32)
    if SHIFT > 0:
        of_feature = gl.load(factor + expert * of_weight + feature, mask=own < features, other=0.0)
    return added, of_feature


@gluon.jit
def _store(made, y, pairs, features, GATE: gl.constexpr, LIMIT: gl.constexpr):
    """Write what comes of a program's features [64, rows], rounded. A thread has a gate and its factor."""
    rows: gl.constexpr = made.shape[1]
    if GATE >= 0:
        gate, times = gl.split(made.reshape([4, 2, 8, rows]).permute((0, 2, 3, 1)).reshape([_TILE // 2, rows, 2]))
        made = _gated(gate.to(gl.float32), times.to(gl.float32), y.dtype.element_ty, GATE, LIMIT)
    layout: gl.constexpr = made.type.layout
    index = gl.arange(0, made.shape[0], layout=gl.SliceLayout(1, layout))
    if GATE >= 0:
        index = index // 8 * 16 + index % 8
    feature, _ = _feature_of(index, features, GATE >= 0)
    pair = gl.load(pairs + gl.program_id(0) * rows + gl.arange(0, rows, layout=gl.SliceLayout(0, layout))).to(gl.int64)
    place = y + pair[None, :] * features + feature[:, None]
    gl.store(place, made, mask=(pair >= 0)[None, :] & (feature < features)[:, None])


def streamed_product(
    x: torch.Tensor,
    weight: ExpertCodes,
    bias: torch.Tensor | None,
    tiles: ExpertTiles,
    num_pairs: int,
    each: int,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Compute `general_product`, of rows that begin at multiples of 16 bytes in tiles of 8, 16, 32 or 64; numbers with
    an exponent in tiles of 128, too, and times bfloat16 alone. With a gate the first half of the features is activated
    and multiplied with the second, as `activate_and_multiply` does: [pairs, features / 2]; half is a multiple of 16."""
    words, size, rows = weight.tensors["words"], group_size(weight), tiles.rows
    form = FORMS[size] if "blocks" in weight.tensors else None
    scales = weight.tensors["scales"] if form is None else weight.tensors["blocks"].view(torch.int32)
    features = weight.features if gate is None else weight.features // 2
    made = x.new_empty((num_pairs, features))
    programs = words.shape[1] if gate is None else 2 * -(-features // TILE)
    at_once, registers = _AT_ONCE_OF_WHOLE[rows] if form is None else _AT_ONCE[rows], None
    if form is not None:
        registers = _REGISTERS.get(rows)
        if rows == 8 and len(tiles.experts) * programs <= _FEW_PROGRAMS * multiprocessors(words.device):
            at_once, registers = _AT_ONCE_OF_FEW, _REGISTERS_OF_FEW
    _product_kernel[(len(tiles.experts), programs)](
        x, words, scales, weight.tensors.get("factor", scales), made if bias is None else bias, made, *tiles,
        features, weight.inputs, words.shape[1], words.shape[2],
        CHOSEN=each, ROWS=rows, AT_ONCE=at_once,
        PARTS=GROUP // size if form is None else GROUP // size // 4,
        SHIFT=0 if form is None else form.shift, OFFSET=0 if form is None else form.offset, ADDS=bias is not None,
        GATE=-1 if gate is None else GATES[gate.activation], LIMIT=math.inf if gate is None else gate.limit,
        num_warps=4, maxnreg=registers, **early_launch.early(x),
    )  # fmt: skip
    return made
