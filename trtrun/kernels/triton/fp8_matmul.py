"""The product with weights of 8 bits (E4M3) on CUDA, whose rows have the same bits in any company.

Activations are rounded to E4M3 by one small kernel, each row by its own largest number, and the matrix units multiply
codes by codes; or they stay as they are, and weights are widened on the way. Each number of a result is one chain of
sums over the inputs, in their order, in one kernel for any number of rows: nothing is split over programs, so neither
the tile nor the number of rows can be seen in it.

Matrix units of compute capability 9.0 add up products of E4M3 with fewer bits than float32 has (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2). They do so for `_GROUP` inputs at a time here; groups are added up in float32.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch_fp8 import LARGEST, SMALLEST_SCALE

_GROUP = 128
"""Inputs that are added up in the matrix units. Every tile has a multiple of them, so that all tiles group alike."""

_ALIGNED = 16
"""Codes of a row begin at a multiple of so many bytes, so that they are read in vectors."""

_SPARE_BYTES = 2048
"""Shared memory that a program needs beside its stages."""

_FEWEST_ROWS, _FEW_ROWS, _SOME_ROWS = 16, 32, 64


class Tile(NamedTuple):
    """What one program computes at a time, and how: rows x features of the result, by so many inputs."""

    rows: int
    features: int
    inputs: int
    num_stages: int
    num_warps: int = 4


@triton.jit
def _round_kernel(
    x, codes, scales, inputs, x_stride, code_stride,
    PADDED: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """One row. See trtrun.kernels.torch_fp8, which rounds alike."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < inputs
    value = tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), LARGEST), SMALLEST)
    value *= tl.div_rn(1.0, scale)
    # Beside 1.5 * 2^20 times its power of two a number of float32 keeps 3 bits of mantissa; below 2^-6 steps stay.
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
    value = (value + magic) - magic
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, x_scale, codes, scale, bias, y, rows, features, inputs, x_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr, ROUNDS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The weight is the side of the matrix units that is 64 wide, so few rows waste nothing. Programs that share its
    features follow each other, so that it comes out of memory once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_feature, is_row = feature < features, row < rows
    # The last tile computes some features again instead of reading behind the weight.
    start = tl.where(is_feature, feature, 0).to(tl.int64) * inputs
    begin = row.to(tl.int64) * x_stride
    total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        number = first + tl.arange(0, INPUTS)
        if IS_EVEN:
            weights = tl.load(codes + start[:, None] + number[None, :], eviction_policy="evict_first")
            values = tl.load(x + begin[None, :] + number[:, None], mask=is_row[None, :], other=0.0)
        else:
            known = number < inputs
            weights = tl.load(
                codes + start[:, None] + number[None, :], mask=known[None, :], other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(x + begin[None, :] + number[:, None], mask=is_row[None, :] & known[:, None], other=0.0)
        if ROUNDS:
            total = tl.dot(weights, values, total, max_num_imprecise_acc=GROUP)
        else:
            total = tl.dot(weights.to(x.dtype.element_ty), values, total)
    factor = tl.load(scale + feature, mask=is_feature, other=0.0)[:, None]
    if ROUNDS:
        total *= factor
        factor = tl.load(x_scale + row, mask=is_row, other=0.0)[None, :]
    if ADDS:
        # Said out loud: a compiler may or may not make one of a product and a sum.
        added = tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        total = tl.fma(total, tl.broadcast_to(factor, (FEATURES, ROWS)), tl.broadcast_to(added, (FEATURES, ROWS)))
    else:
        total *= factor
    place = y + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


def round_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in], whose rows have no gaps → codes [rows, at least in] E4M3 and scales [rows] float32."""
    rows, inputs = x.shape
    stride = triton.cdiv(inputs, _ALIGNED) * _ALIGNED
    codes = torch.empty((rows, stride), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    if rows:
        padded = triton.next_power_of_2(inputs)
        _round_kernel[(rows,)](
            x, codes, scales, inputs, x.stride(0), stride,
            PADDED=padded, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, num_warps=min(32, max(4, padded // 1024)),
            enable_fp_fusion=False,  # a product that is rounded together with what is added to it rounds elsewhere
        )  # fmt: skip
    return codes, scales


def chain_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (codes * scale).T + bias → [rows, out] of `dtype`.

    Args:
        x: [rows, at least in], E4M3 with `x_scale`, else of half precision; rows have no gaps.
        x_scale: [rows] float32, or None.
        codes: [out, in] E4M3, contiguous.
        scale: [out] float32.
        bias: [out] or None.
        dtype: float16 or bfloat16.
        tile: None takes what is fast for so many rows.
    """
    rows = x.shape[0]
    features, inputs = codes.shape
    y = torch.empty((rows, features), dtype=dtype, device=x.device)
    if rows:
        tile = tile or _tile(rows, x_scale is not None, _shared_bytes(x.device))
        _product_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features))](
            x, scale if x_scale is None else x_scale, codes, scale, scale if bias is None else bias, y,
            rows, features, inputs, x.stride(0),
            ROWS=tile.rows, FEATURES=tile.features, INPUTS=tile.inputs, GROUP=_GROUP, IS_EVEN=inputs % tile.inputs == 0,
            ROUNDS=x_scale is not None, ADDS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return y


def _tile(rows: int, rounds: bool, shared_bytes: int) -> Tile:
    """What is fast for so many rows, with as many stages as the multiprocessors have shared memory for.

    Long runs of memory for few rows, and programs enough to keep every multiprocessor reading; squares for many,
    where arithmetic counts. Tiles are 64 features wide at least, what the matrix units take from four warps: narrower
    ones would be computed by other instructions, which may add up in another order."""
    if rows <= _FEW_ROWS:
        width = _FEWEST_ROWS if rows <= _FEWEST_ROWS else _FEW_ROWS
        tile = Tile(width, 64, 256, 4) if rounds else Tile(width, 64, 128, 4)
    elif rows <= _SOME_ROWS:
        tile = Tile(_SOME_ROWS, 64, 128, 4)
    else:
        tile = Tile(128, 128, 128, 4, 8) if rounds else Tile(_SOME_ROWS, 128, 128, 3, 8)
    stage = (tile.features + tile.rows * (1 if rounds else 2)) * tile.inputs
    return tile._replace(num_stages=max(1, min(tile.num_stages, (shared_bytes - _SPARE_BYTES) // stage)))


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; as much as it likes where there is no GPU."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


class TritonFp8Matmul:
    """The product with one weight of 8 bits on CUDA.

    Args:
        codes: [out, in] E4M3, contiguous, none of them NaN.
        scale: [out] float32.
        bias: [out] or None.
        rounds_activations: whether each row of x is rounded to E4M3, too.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self._rounds_activations = rounds_activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16 → [rows, out] in the same dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        values, factor = round_activations(x) if self._rounds_activations else (x, None)
        return chain_product(values, factor, self._codes, self._scale, self._bias, x.dtype)
