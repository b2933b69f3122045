"""Keys and values of 8 bits and their scales, as Triton functions for kernels: rounded on the way to the store, and
widened on the way from it.

Codes are those of trtrun.kvcache.byte_codes. They are widened by moving bits, on any GPU: E4M3 moved up by 20 bits is
a float32, and by 4 a bfloat16, divided by 2^120. It knows codes and scales. It does not know where they lie
(paged_store.py, attention_steps.py).
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
        numbers: the store's layer as attention reads it: as it is, or two codes a number of 16 bits.
        token_scales: the store's layer as float32: what lies in it of scales; not read where there are none.
        layer_scales: [2, kv_heads] float32, the layer's; not read where it has none.
    """

    codes: int
    has_layer_scales: bool
    numbers: torch.Tensor
    token_scales: torch.Tensor
    layer_scales: torch.Tensor

    @classmethod
    def of(cls, kv_format: KVFormat, store_layer: torch.Tensor, kv_scales: torch.Tensor | None) -> KeptNumbers:
        """How numbers of a store's layer are held, of the layer and its scales as an `AttentionBackend` gets them."""
        if not isinstance(kv_format, ByteKV):
            return cls(PLAIN.value, False, store_layer, store_layer, store_layer)
        codes = FP8.value if kv_format.kind == "fp8" else INT8.value
        pairs = store_layer.view(torch.int16)
        if kv_format.has_layer_scales:
            assert kv_scales is not None, "a layer with scales of its own hands them over"
            return cls(codes, True, pairs, store_layer, kv_scales)
        of_tokens = store_layer.view(-1).view(torch.float32)
        return cls(codes, False, pairs, of_tokens, of_tokens)


@triton.jit
def as_scales(largest, CODES: tl.constexpr):
    """Largest numbers of any shape, float32 → the scales that make the largest code of them, alike: numbers of
    bfloat16."""
    most: tl.constexpr = _FP8_MOST if CODES == FP8 else _INT8_MOST
    scale = tl.div_rn(largest, most)
    bits = tl.minimum(tl.maximum(scale, _LEAST_SCALE), _MOST_SCALE).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)  # to nearest even


@triton.jit
def to_codes(rows, scale, CODES: tl.constexpr):
    """rows [n, numbers] float32 and their scales [n] → codes uint8, rounded to nearest even."""
    most: tl.constexpr = _FP8_MOST if CODES == FP8 else _INT8_MOST
    value = rows * tl.div_rn(1.0, scale)[:, None]
    value = tl.minimum(tl.maximum(value, -most), most)  # before a sum, so that no product is part of one
    if CODES == FP8:
        # As in fused.py: beside 1.5 * 2^20 times its power of two a number keeps 3 bits of mantissa.
        exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
        moved = (((value + magic) - magic) * _DOWN).to(tl.int32, bitcast=True)
        sign = value.to(tl.int32, bitcast=True) >> 24  # which a sum of nothing has lost
        return ((sign & 0x80) | ((moved >> 20) & 0x7F)).to(tl.uint8)
    # Beside 1.5 * 2^23 a number has no bits behind its point.
    return ((value + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def widened(pairs, kind: tl.constexpr, CODES: tl.constexpr):
    """Codes, two a number of 16 bits → what the lower ones stand for but for their scales, and the upper ones, each of
    `kind`, exactly. Two at a time, as matrix units and copies take numbers of 16 bits in the order of plain ones, which
    bytes are not taken in."""
    if kind == tl.float32 or _INTERPRETS:
        low, high = _number(pairs.to(tl.int32) & 0xFF, CODES), _number((pairs.to(tl.int32) >> 8) & 0xFF, CODES)
        low, high = low.to(kind), high.to(kind)
    elif kind == tl.bfloat16:
        in_bfloat16: tl.constexpr = _FP8_BFLOAT16 if CODES == FP8 else _INT8_BFLOAT16
        low, high = tl.inline_asm_elementwise(
            in_bfloat16, "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        in_float16: tl.constexpr = _FP8_FLOAT16 if CODES == FP8 else _INT8_FLOAT16
        low, high = tl.inline_asm_elementwise(
            in_float16, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def _number(code, CODES: tl.constexpr):
    """Codes int32 from 0 to 255 → float32."""
    if CODES == FP8:
        number = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * _UP
    else:
        number = ((code ^ 0x80) - 0x80).to(tl.float32)
    return number


def _fp8_pairs(up: int, down: int, magnitude: int, fma: str, factor: int) -> str:
    """Sign and magnitude where a number has them, times a power of two, and nothing (-0) added: lower codes are moved
    up by `up` bits, and upper ones down by `down`."""
    return f"""
    {{
    .reg .b32 number, sign, factor, nothing;
    mov.b32 factor, {factor:#010x};
    mov.b32 nothing, 0x80008000;
    shl.b32 number, $2, {up};
    and.b32 number, number, {magnitude:#010x};
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 number, number, sign;
    fma.rn.{fma}x2 $0, number, factor, nothing;
    shr.b32 number, $2, {down};
    and.b32 number, number, {magnitude:#010x};
    and.b32 sign, $2, 0x80008000;
    or.b32 number, number, sign;
    fma.rn.{fma}x2 $1, number, factor, nothing;
    }}
"""


_FP8_BFLOAT16 = tl.constexpr(_fp8_pairs(4, 4, 0x07F007F0, "bf16", 0x7B807B80))
_FP8_FLOAT16 = tl.constexpr(_fp8_pairs(7, 1, 0x3F803F80, "f16", 0x5C005C00))
"""Times 2^120, and 2^8."""

_INT8_BFLOAT16 = tl.constexpr("""
    {
    .reg .b32 upper, number, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    and.b32 number, $2, 0x007f007f;
    or.b32 number, number, 0x43004300;
    and.b32 sign, $2, 0x00800080;
    or.b32 sign, sign, 0x43004300;
    fma.rn.bf16x2 $0, sign, minus, number;
    shr.b32 upper, $2, 8;
    and.b32 number, upper, 0x007f007f;
    or.b32 number, number, 0x43004300;
    and.b32 sign, upper, 0x00800080;
    or.b32 sign, sign, 0x43004300;
    fma.rn.bf16x2 $1, sign, minus, number;
    }
""")
"""128 and the lower seven bits are a bfloat16, and so are 128 and the sign's bit; their difference is the number."""

_INT8_FLOAT16 = tl.constexpr("""
    {
    .reg .b32 number, less;
    mov.b32 less, 0xe480e480;
    and.b32 number, $2, 0x00ff00ff;
    xor.b32 number, number, 0x64806480;
    add.rn.f16x2 $0, number, less;
    shr.b32 number, $2, 8;
    and.b32 number, number, 0x00ff00ff;
    xor.b32 number, number, 0x64806480;
    add.rn.f16x2 $1, number, less;
    }
""")
"""1152 and the number are a float16, less 1152."""
