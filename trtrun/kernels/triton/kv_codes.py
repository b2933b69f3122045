"""Keys and values of 8 bits and their scales, as Triton functions for kernels: rounded on the way to the store, and
widened on the way from it.

They have the bits of trtrun.kvcache.byte_codes. Codes are widened by moving bits, on any GPU: E4M3 moved up by 20 bits
is a float32, and by 4 a bfloat16, divided by 2^120. It knows codes and scales. It does not know where they lie
(paged_store.py, paged_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from trtrun.kvcache import byte_codes
from trtrun.kvcache.formats import ByteKV, KVFormat

PLAIN, FP8, INT8 = (tl.constexpr(number) for number in range(3))
"""What a store has, as kernels are told: keys and values as they are, codes of E4M3, or whole numbers."""

SCALE_BYTES, ALIGNED = tl.constexpr(byte_codes.SCALE_BYTES), tl.constexpr(byte_codes.ALIGNED)

_FP8_MOST, _INT8_MOST = (tl.constexpr(byte_codes.LARGEST[kind]) for kind in ("fp8", "int8"))
_LEAST_SCALE, _MOST_SCALE = tl.constexpr(byte_codes.LEAST_SCALE), tl.constexpr(byte_codes.MOST_SCALE)
_INTERPRETS = tl.constexpr(bool(knobs.runtime.interpret))
"""Triton's interpreter, which has no assembler."""

_UP, _DOWN = tl.constexpr(2.0**120), tl.constexpr(2.0**-120)


@dataclass(frozen=True)
class KeptNumbers:
    """How a layer's store has keys and values, as kernels take it.

    Attributes:
        codes: PLAIN, FP8 or INT8.
        has_layer_scales: whether the layer has scales for all tokens.
        token_scales: the store's layer as float32: what lies in it of scales; not read where there are none.
        layer_scales: [2, kv_heads] float32, the layer's; not read where it has none.
    """

    codes: int
    has_layer_scales: bool
    token_scales: torch.Tensor
    layer_scales: torch.Tensor

    @classmethod
    def of(cls, kv_format: KVFormat, store_layer: torch.Tensor, kv_scales: torch.Tensor | None) -> KeptNumbers:
        """Of a store's layer; see AttentionBackend."""
        if not isinstance(kv_format, ByteKV):
            return cls(PLAIN.value, False, store_layer, store_layer)
        codes = FP8.value if kv_format.kind == "fp8" else INT8.value
        if kv_format.has_layer_scales:
            assert kv_scales is not None, "a layer with scales of its own hands them over"
            return cls(codes, True, store_layer, kv_scales)
        of_tokens = store_layer.view(-1).view(torch.float32)
        return cls(codes, False, of_tokens, of_tokens)


@triton.jit
def row_scales(rows, CODES: tl.constexpr):
    """The scales of rows [n, numbers] float32, zeros behind them: [n] float32, numbers of bfloat16."""
    most: tl.constexpr = _FP8_MOST if CODES == FP8 else _INT8_MOST
    scale = tl.div_rn(tl.max(tl.abs(rows), axis=1), most)
    bits = tl.minimum(tl.maximum(scale, _LEAST_SCALE), _MOST_SCALE).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)  # to nearest even


@triton.jit
def to_codes(rows, scale, CODES: tl.constexpr):
    """rows [n, numbers] float32 and their scales [n] → codes uint8, rounded to nearest even."""
    most: tl.constexpr = _FP8_MOST if CODES == FP8 else _INT8_MOST
    value = rows * tl.div_rn(1.0, scale)[:, None]
    value = tl.minimum(tl.maximum(value, -most), most)  # before a sum, so that no product is part of one
    if CODES == FP8:
        # As in `fp8_rounding`: beside 1.5 * 2^20 times its power of two a number keeps 3 bits of mantissa.
        exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
        moved = (((value + magic) - magic) * _DOWN).to(tl.int32, bitcast=True)
        return (((moved >> 24) & 0x80) | ((moved >> 20) & 0x7F)).to(tl.uint8)
    # Beside 1.5 * 2^23 a number has no bits behind its point.
    return ((value + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def from_codes(codes, scale, kind: tl.constexpr, CODES: tl.constexpr):
    """Codes uint8 and their scales float32, which broadcast → numbers of `kind`."""
    if kind == tl.bfloat16:
        made = _to_bfloat16(codes, scale, CODES)
    else:
        if CODES == FP8:
            whole = codes.to(tl.int32)
            number = (((whole & 0x80) << 24) | ((whole & 0x7F) << 20)).to(tl.float32, bitcast=True) * _UP
        else:
            number = codes.to(tl.int8, bitcast=True).to(tl.float32)
        made = (number * scale).to(kind)
        if kind == tl.float16 and not _INTERPRETS:
            made = _taken_in_order(made)
    return made


@triton.jit
def _taken_in_order(numbers):
    """The same, but matrix units take them in the order in which they take plain ones. Where Triton sees that numbers
    of half precision come from bytes, few queries take them in another order than many do: then bits differ."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.float16, is_pure=False, pack=2)


_FP8_PAIRS = tl.constexpr("""
    {
    .reg .b32 low, high;
    shl.b32 low, $2, 4;
    and.b32 low, low, 0xf0f0f0f0;
    shr.b32 high, $2, 4;
    and.b32 high, high, 0x07070707;
    lop3.b32 high, $2, 0x80808080, high, 0xea;
    prmt.b32 $0, low, high, 0x5140;
    prmt.b32 $1, low, high, 0x7362;
    }
""")
"""Sign and exponent, and mantissa, as bytes; then both of each code side by side."""

_INT8_PAIRS = tl.constexpr("""
    {
    .reg .b32 low, sign, above, minus, first, second;
    and.b32 low, $2, 0x7f7f7f7f;
    and.b32 sign, $2, 0x80808080;
    mov.b32 above, 0x43434343;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 first, low, above, 0x4140;
    prmt.b32 second, low, above, 0x4342;
    prmt.b32 low, sign, above, 0x4140;
    prmt.b32 sign, sign, above, 0x4342;
    fma.rn.bf16x2 $0, low, minus, first;
    fma.rn.bf16x2 $1, sign, minus, second;
    }
""")
"""128 and the lower seven bits are a bfloat16, and so are 128 and the sign's bit; their difference is the number."""


@triton.jit
def _to_bfloat16(codes, scale, CODES: tl.constexpr):
    """`from_codes`, four at a time in seven or eight operations, where compilers take two dozen."""
    pairs: tl.constexpr = _FP8_PAIRS if CODES == FP8 else _INT8_PAIRS
    # It has no effect beside its results. But what is said to have none is done behind the turn that the matrix unit
    # wants, and codes of values would be read one by one for it.
    numbers = tl.inline_asm_elementwise(pairs, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4)
    if CODES == FP8:
        scale *= _UP  # which the codes' numbers lack
    return numbers * scale.to(tl.bfloat16)
