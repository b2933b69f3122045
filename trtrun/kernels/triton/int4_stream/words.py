"""Words of codes of 4 bits and their scales, in shared memory, to what the matrix units take from registers.

Codes lie in the order in which threads hold them (trtrun.kernels.torch.integers): a thread reads its words, and each of
them is four pairs of numbers after a mask and a product with a sum; nothing changes threads. It knows a tile and its
layout. It does not know products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trtrun.kernels.torch.integers import BFLOAT16_UNIT, FLOAT16_UNIT, GROUP, TILE

_TILE, _GROUP = gl.constexpr(TILE), gl.constexpr(GROUP)
LINE = gl.constexpr(32)
"""Words of 128 bytes, which shared memory is laid out by."""

_BFLOAT16_LOW = gl.constexpr(
    "{.reg .b32 c, m; and.b32 c, $1, 0x000F000F; mov.b32 m, 0x7F007F00; fma.rn.bf16x2 $0, c, m, $2;}"
)
_BFLOAT16_HIGH = gl.constexpr(
    "{.reg .b32 c, m; and.b32 c, $1, 0x00F000F0; mov.b32 m, 0x7D007D00; fma.rn.bf16x2 $0, c, m, $2;}"
)
_FLOAT16_LOW = gl.constexpr(
    "{.reg .b32 c, m; and.b32 c, $1, 0x000F000F; mov.b32 m, 0x78007800; fma.rn.f16x2 $0, c, m, $2;}"
)
_FLOAT16_HIGH = gl.constexpr(
    "{.reg .b32 c, m; and.b32 c, $1, 0x00F000F0; mov.b32 m, 0x68006800; fma.rn.f16x2 $0, c, m, $2;}"
)
"""Codes in the lowest four bits of two numbers of half precision, or in the next four, are subnormal numbers: times a
power of two they are the code times `UNITS`, and the negative zero point times that is added. Nothing is rounded."""

_UNITS_OF_BFLOAT16 = gl.constexpr(1 / BFLOAT16_UNIT)
_UNITS_OF_FLOAT16 = gl.constexpr(1 / FLOAT16_UNIT)


@gluon.constexpr_function
def _layout_of_scales(height):
    """Layout of [height, 32]: features as the matrix units take them, so that no scale has to change threads."""
    rows = [[1 << bit, 0] for bit in range(1, height.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[0, 8], *rows], lanes, [[0, 16], [1, 0]], [], [height, 32])


@gluon.jit
def read_scales(factors, GROUPS: gl.constexpr):
    """Scales and zero points of a step, for 128 inputs each [parts * 64], of words [8 * parts, 32] for four of
    them. GROUPS: 4 or 8."""
    height: gl.constexpr = factors.shape[0] * 4 // GROUPS
    if GROUPS > 4:
        return read_scales(factors.slice(0, height), 4) + read_scales(factors.slice(height, height), 4)
    else:
        both = factors.load(_layout_of_scales(height)).reshape([2, 2, height * LINE // 4]).permute((2, 1, 0))
        even, odd = gl.split(both.permute((0, 2, 1)))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return first, second, third, fourth


@gluon.jit
def read_group(factors, group):
    """Read the words of one of the four groups."""
    first, second, third, fourth = read_scales(factors, 4)
    return gl.where(group < 2, gl.where(group < 1, first, second), gl.where(group < 3, third, fourth))


@gluon.jit
def in_parts(both):
    """Scales and zero points [parts * 64] for each part of 128 inputs, [64] each."""
    if both.shape[0] == _TILE:
        return (both,)
    elif both.shape[0] == 2 * _TILE:
        return gl.split(both.reshape([2, _TILE]).permute((1, 0)))
    else:
        even, odd = gl.split(both.reshape([2, 2, _TILE]).permute((2, 0, 1)))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return first, second, third, fourth


@gluon.jit
def factor_of(both, LAYOUT: gl.constexpr, KIND: gl.constexpr):
    """Scales [features] float32 of scales and zero points, by which sums of what `widen` makes are multiplied."""
    both = gl.convert_layout(both, LAYOUT)
    if gl.bfloat16 == KIND:
        return (both << 16).to(gl.float32, bitcast=True) * _UNITS_OF_BFLOAT16
    else:
        return (both & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) * _UNITS_OF_FLOAT16


@gluon.jit
def _zeros_of(both, LAYOUT: gl.constexpr):
    """Zero points of scales and zero points [features], as pairs of equal numbers [features, 8]."""
    zero = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3232;", "=r,r",
        [gl.convert_layout(both, gl.SliceLayout(1, LAYOUT))], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return zero.expand_dims(1).broadcast_to([zero.shape[0], 8])


@gluon.jit
def read_words(words):
    """Words for 128 inputs [32, 32], each by the thread that has its weights."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [LINE, LINE]
    )
    return words.load(layout)


@gluon.jit
def split_words(words):
    """Words for 128 inputs, as read: those of the first 64 and of the others, [64, 8] each; of several tiles one behind
    the other."""
    tiles: gl.constexpr = words.shape[0] // LINE
    # (tile, feature bit 3, warp, feature bits 1 and 2, feature bit 0, pair bits 0 and 1, pair bit 2, half)
    bits = words.reshape([tiles, 2, 4, 4, 2, 4, 2, 2])
    return gl.split(bits.permute((0, 2, 1, 3, 4, 6, 5, 7)).reshape([tiles * _TILE, 8, 2]))


@gluon.jit
def widen(words, parts, OPERAND: gl.constexpr, KIND: gl.constexpr):
    """Words for 128 inputs, as read, and scales with zero points of their parts, [64] each → for each part codes less
    the zero points, times `UNITS`, [64, inputs of a part] as the matrix units take them from registers."""
    low, high = split_words(words)
    place: gl.constexpr = low.type.layout
    last: gl.constexpr = len(parts) - 1
    zero = _zeros_of(parts[0], place)
    first = _two(low, zero, KIND)
    if last > 1:
        zero = _zeros_of(parts[1], place)
    second = _two(low >> 8, zero, KIND)
    if last > 0:
        zero = _zeros_of(parts[last // 2 + 1], place)
    third = _two(high, zero, KIND)
    if last > 1:
        zero = _zeros_of(parts[3], place)
    fourth = _two(high >> 8, zero, KIND)
    # [64, 8 pairs, bit 0 of the sixteen, bit 1, bit 2]
    if last == 0:
        pairs = gl.join(gl.join(first, second), gl.join(third, fourth)).permute((0, 4, 3, 2, 1))
        return (as_operand(pairs.reshape([low.shape[0], 64]), OPERAND, KIND),)
    elif last == 1:
        lower, upper = gl.join(first, second).permute((0, 3, 2, 1)), gl.join(third, fourth).permute((0, 3, 2, 1))
        return (
            as_operand(lower.reshape([_TILE, 32]), OPERAND, KIND),
            as_operand(upper.reshape([_TILE, 32]), OPERAND, KIND),
        )
    else:
        return (
            as_operand(first.permute((0, 2, 1)).reshape([_TILE, 16]), OPERAND, KIND),
            as_operand(second.permute((0, 2, 1)).reshape([_TILE, 16]), OPERAND, KIND),
            as_operand(third.permute((0, 2, 1)).reshape([_TILE, 16]), OPERAND, KIND),
            as_operand(fourth.permute((0, 2, 1)).reshape([_TILE, 16]), OPERAND, KIND),
        )


@gluon.jit
def _two(words, zero, KIND: gl.constexpr):
    """Pairs of numbers of the lowest two codes in each half of the words: [64, 8, 2]."""
    LOW: gl.constexpr = _BFLOAT16_LOW if gl.bfloat16 == KIND else _FLOAT16_LOW
    HIGH: gl.constexpr = _BFLOAT16_HIGH if gl.bfloat16 == KIND else _FLOAT16_HIGH
    one = gl.inline_asm_elementwise(LOW, "=r,r,r", [words, zero], dtype=gl.int32, is_pure=True, pack=1)
    other = gl.inline_asm_elementwise(HIGH, "=r,r,r", [words, zero], dtype=gl.int32, is_pure=True, pack=1)
    return gl.join(one, other)


@gluon.jit
def as_operand(pairs, OPERAND: gl.constexpr, KIND: gl.constexpr):
    """Pairs of numbers [features, n] → [features, 2 n]."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    numbers = gl.join(even, odd).reshape([pairs.shape[0], 2 * pairs.shape[1]]).to(KIND, bitcast=True)
    return gl.convert_layout(numbers, OPERAND)
