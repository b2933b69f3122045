"""Rounding rows of activations to E4M3 in Triton, whole or in groups: functions for kernels that have a row, and
kernels that do nothing else.

It rounds as trtrun.kernels.torch.fp8 and fp8_block do, bit for bit. It knows rows; it does not know when Triton can be
used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.rounded_rows import GROUP, RoundedRows, Rounding
from trtrun.kernels.torch import fp8 as torch_fp8
from trtrun.kernels.triton.early_launch import begin, early

_ALIGNED = 16
"""Codes of a row begin at a multiple of so many bytes, so that they are read in vectors; and scales of a group lie in
memory for a multiple of so many rows."""

_BLOCK = 1024
"""Numbers of a program that rounds in groups."""

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(torch_fp8.LARGEST)
_SMALLEST_SCALE = tl.constexpr(torch_fp8.SMALLEST_SCALE)


@triton.jit
def _scale_of(largest):
    return tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST_SCALE)


@triton.jit
def _round(value, factor):
    """float32 times a factor of the same shape → the numbers of its codes, in float32."""
    # Rounded by itself: a compiler would make one of a product and the sum behind it, which rounds elsewhere.
    value = tl.fma(value, factor, tl.zeros_like(value))
    # Beside 1.5 * 2^20 times its power of two a number of float32 keeps 3 bits of mantissa; below 2^-6 steps stay.
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
    return (value + magic) - magic


@triton.jit
def round_row(value, PADDED: tl.constexpr):
    """[PADDED] float32, zeros behind the row → the numbers of its codes, in float32, and its scale."""
    scale = _scale_of(tl.max(tl.abs(value), axis=0))
    return _round(value, tl.broadcast_to(tl.div_rn(1.0, scale), (PADDED,))), scale


@triton.jit
def round_groups(value, PADDED: tl.constexpr):
    """[PADDED] float32, zeros behind the row, of at least a group → the numbers of its codes, in float32, and the scale
    of each group."""
    groups: tl.constexpr = PADDED // _GROUP
    value = tl.reshape(value, (groups, _GROUP))
    scale = _scale_of(tl.max(tl.abs(value), axis=1))
    value = _round(value, tl.broadcast_to(tl.div_rn(1.0, scale)[:, None], (groups, _GROUP)))
    return tl.reshape(value, (PADDED,)), scale


@triton.jit
def store_scales(scales, scale, row, first, numbers, stride, PADDED: tl.constexpr):
    """Scales of PADDED numbers of a row, from the group `first` on, of those that a row of so many numbers has."""
    group = first + tl.arange(0, PADDED // _GROUP)
    tl.store(scales + group.to(tl.int64) * stride + row, scale, mask=group * _GROUP < numbers)


@triton.jit
def _round_kernel(x, codes, scales, inputs, x_stride, code_stride, PADDED: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < inputs
    value, scale = round_row(tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32), PADDED)
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _round_groups_kernel(
    x, codes, scales, inputs, x_stride, code_stride, scale_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < inputs
    value, scale = round_groups(tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32), BLOCK)
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    store_scales(scales, scale, row, tl.program_id(1) * (BLOCK // _GROUP), inputs, scale_stride, BLOCK)


def round_activations(x: torch.Tensor, rounding: Rounding = "row") -> RoundedRows:
    """x [rows, inputs] of half precision or float32, whose rows have no gaps, rounded."""
    made = empty_rows(x.shape[0], x.shape[1], x, rounding)
    rows, inputs = x.shape
    if rows and rounding == "group":
        _round_groups_kernel[(rows, triton.cdiv(inputs, _BLOCK))](
            x, made.codes, made.scale, inputs, x.stride(0), made.codes.stride(0), made.scale.stride(1),
            BLOCK=_BLOCK, num_warps=4, **early(x),
        )  # fmt: skip
    elif rows:
        padded = triton.next_power_of_2(inputs)
        _round_kernel[(rows,)](
            x, made.codes, made.scale, inputs, x.stride(0), made.codes.stride(0),
            PADDED=padded, num_warps=warps_for(padded), **early(x),
        )  # fmt: skip
    return made


def empty_rows(rows: int, inputs: int, like: torch.Tensor, rounding: Rounding = "row") -> RoundedRows:
    """Room for rounded rows on the device of `like`, and with its dtype."""
    codes = torch.empty((rows, _align(inputs)), dtype=torch.float8_e4m3fn, device=like.device)
    shape = (rows,) if rounding == "row" else (triton.cdiv(inputs, GROUP), _align(rows))
    scale = torch.empty(shape, dtype=torch.float32, device=like.device)
    return RoundedRows(codes, scale if rounding == "row" else scale.T[:rows], like.dtype)


def _align(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def warps_for(padded: int) -> int:
    """Warps of a program that has a row of so many numbers."""
    return min(32, max(4, padded // 512))
