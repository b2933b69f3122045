"""Words of codes of 4 bits and their scales, in shared memory, to weights in registers as the matrix units take them.

Codes lie in the order in which threads hold them (trtrun.kernels.torch.int4): a thread reads its words, and each of
them is four pairs of numbers after a mask, a difference and a product; nothing changes threads. It knows a tile and its
layout. It does not know products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trtrun.kernels.torch.int4 import GROUP, STEP, TILE

_TILE, _GROUP, _GROUPS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(STEP // GROUP)
LINE = gl.constexpr(32)
"""Words of 128 bytes, which shared memory is laid out by."""

_WIDEN_BFLOAT16 = gl.constexpr("""{
.reg .b32 code;
lop3.b32 code, $1, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 code, code, $3;
mul.rn.bf16x2 $0, code, $2;
}""")
_WIDEN_FLOAT16 = gl.constexpr("""{
.reg .b32 code;
lop3.b32 code, $1, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 code, code, $3;
mul.rn.f16x2 $0, code, $2;
}""")
"""Codes in the lowest bits of two numbers of half precision that are whole there: 128 + code, or 1024 + code; less as
much and the zero point; times the scale. Only the last is rounded."""


@gluon.constexpr_function
def _layout_of_scales(height):
    """Of [height, 32]: features as the matrix units take them, so that no scale has to change threads."""
    rows = [[1 << bit, 0] for bit in range(1, height.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[0, 8], *rows], lanes, [[0, 16], [1, 0]], [], [height, 32])


@gluon.jit
def read_scales(factors):
    """Scales and zero points of a step, for 128 inputs each [parts * 64], of words [8 * parts, 32]."""
    height: gl.constexpr = factors.shape[0]
    layout: gl.constexpr = _layout_of_scales(height)
    both = factors.load(layout).reshape([2, 2, height * LINE // _GROUPS]).permute((2, 1, 0))
    even, odd = gl.split(both.permute((0, 2, 1)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _in_quarters(both):
    """Scales and zero points [parts * 64] for each quarter of 128 inputs, [64] each: of parts or of all."""
    if both.shape[0] == _TILE:
        return both, both, both, both
    elif both.shape[0] == 2 * _TILE:
        low, high = gl.split(both.reshape([2, _TILE]).permute((1, 0)))
        return low, low, high, high
    else:
        even, odd = gl.split(both.reshape([2, 2, _TILE]).permute((2, 0, 1)))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return first, second, third, fourth


@gluon.jit
def _spread(both, LAYOUT: gl.constexpr):
    """Scales and zero points [64] → scales, and zero points, as pairs of equal numbers [64, 8]."""
    scale, zero = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;", "=r,=r,r",
        [gl.convert_layout(both, gl.SliceLayout(1, LAYOUT))], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return scale.expand_dims(1).broadcast_to([_TILE, 8]), zero.expand_dims(1).broadcast_to([_TILE, 8])


@gluon.jit
def widen(words, both, OPERAND: gl.constexpr, KIND: gl.constexpr):
    """Words for 128 inputs [32, 32] and scales with zero points [parts * 64] → weights [64, 128] as the matrix units
    take them from registers."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [LINE, LINE]
    )
    # (feature bit 3, warp, feature bits 1 and 2, feature bit 0, pair bits 0 and 1, pair bit 2, half)
    bits = words.load(layout).reshape([2, 4, 4, 2, 4, 2, 2])
    low, high = gl.split(bits.permute((1, 0, 2, 3, 5, 4, 6)).reshape([_TILE, 8, 2]))
    place: gl.constexpr = low.type.layout
    parts: gl.constexpr = both.shape[0] // _TILE
    one, two, three, four = _in_quarters(both)
    scale, zero = _spread(one, place)
    first = gl.join(_pairs(low, 0, scale, zero, KIND), _pairs(low, 4, scale, zero, KIND))
    if parts > 2:
        scale, zero = _spread(two, place)
    second = gl.join(_pairs(low, 8, scale, zero, KIND), _pairs(low, 12, scale, zero, KIND))
    if parts > 1:
        scale, zero = _spread(three, place)
    third = gl.join(_pairs(high, 0, scale, zero, KIND), _pairs(high, 4, scale, zero, KIND))
    if parts > 2:
        scale, zero = _spread(four, place)
    fourth = gl.join(_pairs(high, 8, scale, zero, KIND), _pairs(high, 12, scale, zero, KIND))
    # [64, 8 pairs, bit 0 of the sixteen, bit 1, bit 2]
    pairs = gl.join(gl.join(first, second), gl.join(third, fourth)).permute((0, 4, 3, 2, 1)).reshape([_TILE, 64])
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.join(even, odd).reshape([_TILE, _GROUP]).to(KIND, bitcast=True)
    return gl.convert_layout(weights, OPERAND)


@gluon.jit
def _pairs(words, SHIFT: gl.constexpr, scale, zero, KIND: gl.constexpr):
    """Pairs of weights: those whose codes are SHIFT bits up in each half of the words."""
    ASM: gl.constexpr = _WIDEN_BFLOAT16 if gl.bfloat16 == KIND else _WIDEN_FLOAT16
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words >> SHIFT, scale, zero], dtype=gl.int32, is_pure=True, pack=1
    )
