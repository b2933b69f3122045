"""Rounding rows of activations to E4M3 in Triton: a function for kernels that have a whole row, and one such kernel.

It rounds as trtrun.kernels.torch.fp8 does, bit for bit. It knows rows; it does not know when Triton can be used (see
support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.rounded_rows import RoundedRows
from trtrun.kernels.torch import fp8 as torch_fp8
from trtrun.kernels.triton.early_launch import begin, early

_ALIGNED = 16
"""Codes of a row begin at a multiple of so many bytes, so that they are read in vectors."""

_LARGEST = tl.constexpr(torch_fp8.LARGEST)
_SMALLEST_SCALE = tl.constexpr(torch_fp8.SMALLEST_SCALE)


@triton.jit
def round_row(value, PADDED: tl.constexpr):
    """[PADDED] float32, zeros behind the row → the numbers of its codes, in float32, and its scale."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), _LARGEST), _SMALLEST_SCALE)
    # Rounded by itself: a compiler would make one of a product and the sum behind it, which rounds elsewhere.
    factor = tl.broadcast_to(tl.div_rn(1.0, scale), (PADDED,))
    value = tl.fma(value, factor, tl.zeros((PADDED,), tl.float32))
    # Beside 1.5 * 2^20 times its power of two a number of float32 keeps 3 bits of mantissa; below 2^-6 steps stay.
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
    return (value + magic) - magic, scale


@triton.jit
def _round_kernel(x, codes, scales, inputs, x_stride, code_stride, PADDED: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < inputs
    value, scale = round_row(tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32), PADDED)
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_activations(x: torch.Tensor) -> RoundedRows:
    """x [rows, inputs] of half precision or float32, whose rows have no gaps, rounded."""
    made = empty_rows(x.shape[0], x.shape[1], x)
    rows, inputs = x.shape
    if rows:
        padded = triton.next_power_of_2(inputs)
        _round_kernel[(rows,)](
            x, made.codes, made.scale, inputs, x.stride(0), made.codes.stride(0),
            PADDED=padded, num_warps=warps_for(padded), **early(x),
        )  # fmt: skip
    return made


def empty_rows(rows: int, inputs: int, like: torch.Tensor) -> RoundedRows:
    """Room for rounded rows on the device of `like`, and with its dtype."""
    stride = triton.cdiv(inputs, _ALIGNED) * _ALIGNED
    codes = torch.empty((rows, stride), dtype=torch.float8_e4m3fn, device=like.device)
    return RoundedRows(codes, torch.empty((rows,), dtype=torch.float32, device=like.device), like.dtype)


def warps_for(padded: int) -> int:
    """Warps of a program that has a row of so many numbers."""
    return min(32, max(4, padded // 512))
