"""The product with weights of 4 bits on CUDA, whose rows have the same bits in any company.

The matrix units sum up activations times codes less their zero point, which are exact, for the inputs that share a
scale; such sums, times the scale, are added up in float32, in the order of the inputs. So no weight is rounded but by
the checkpoint itself, and neither the tile nor the number of rows can be seen in a result. The kernel here is the
general one. On compute capability 9.0 another one is faster (int4_stream), with the same bits.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch.int4 import GROUP, STEP, TILE, UNITS, groups_of
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.int4_stream.suitability import Streamed

_TILE, _GROUP, _WORDS = tl.constexpr(TILE), tl.constexpr(GROUP), tl.constexpr(TILE * GROUP // 8)

_FEWEST_ROWS, _WIDEST = 16, 64
"""Rows of a tile."""


@triton.jit
def _read_codes(words, at, SIZE: tl.constexpr):
    """Codes of a tile for SIZE inputs, which are the `at`-th of all such: [64, SIZE] int32."""
    feature, pair = tl.arange(0, _TILE), tl.arange(0, SIZE // 2)
    in_group: tl.constexpr = _GROUP // SIZE
    place = words + (at // in_group).to(tl.int64) * _WORDS
    pair = at % in_group * (SIZE // 2) + pair
    of_feature = (feature >> 3 & 1) * 512 + (feature >> 4) * 128 + (feature >> 1 & 3) * 32 + (feature & 1) * 16
    of_pair = (pair & 3) * 4 + (pair >> 2 & 1) * 2 + (pair >> 5)
    found = tl.load(place + of_feature[:, None] + of_pair[None, :], eviction_policy="evict_first")
    found = found >> ((pair >> 3 & 3) * 4)[None, :]
    return tl.join(found & 15, found >> 16 & 15).reshape([_TILE, SIZE])


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, words, scales, bias, y, rows, features, inputs, groups, x_stride,
    ROWS: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of the weight for ROWS rows; `groups` are those of SIZE inputs that a tile has room for."""
    begin(EARLY)
    kind: tl.constexpr = x.dtype.element_ty
    tile, within = tl.program_id(0), tl.arange(0, _TILE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((_TILE, ROWS), dtype=tl.float32)
    for group in range(0, inputs // SIZE):
        both = tl.load(scales + (tile * groups + group).to(tl.int64) * _TILE + within)
        scale = (both & 0xFFFF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        zero = (both >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32) * (-1 / UNIT)
        codes = _read_codes(words, tile * groups + group, SIZE).to(tl.float32) - zero[:, None]
        number = group * SIZE + tl.arange(0, SIZE)
        place = x + row[None, :].to(tl.int64) * x_stride + number[:, None]
        sums = tl.dot(codes.to(kind), tl.load(place, mask=(row < rows)[None, :], other=0.0))
        # Said out loud: a compiler may or may not make one of a product and a sum.
        total = tl.fma(sums, tl.broadcast_to(scale[:, None], (_TILE, ROWS)), total)
    feature = tile * _TILE + within
    result = total.to(kind)
    if ADDS:
        added = tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
        result = (result.to(tl.float32) + added).to(kind)
    place = y + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(place, result, mask=(row < rows)[None, :] & (feature < features)[:, None])


def chain_product(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [rows, in] → [rows, out], any number of rows of half precision, whose numbers have no gaps; `out` are all
    features of the tiles.

    Args:
        x: the rows; inputs are a multiple of 128.
        words, scales: see trtrun.kernels.torch.int4.
        bias: [out] in the dtype of activations, or None.
    """
    (rows, inputs), features, size = x.shape, words.shape[0] * TILE, GROUP // groups_of(scales)
    y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if rows:
        width = min(_WIDEST, max(_FEWEST_ROWS, triton.next_power_of_2(rows)))
        _product_kernel[(words.shape[0], triton.cdiv(rows, width))](
            x, words, scales, y if bias is None else bias, y,
            rows, features, inputs, words.shape[1] * STEP // size, x.stride(0),
            ROWS=width, SIZE=size, UNIT=UNITS[x.dtype], ADDS=bias is not None, num_warps=4, **early(x),
        )  # fmt: skip
    return y


class TritonInt4Matmul:
    """The product with one weight of 4 bits on CUDA.

    Args:
        words, scales: see trtrun.kernels.torch.int4.
        bias: [out] or None. It is added to the rounded product.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = (words, scales, bias)
        self._streamed = Streamed(words, scales, bias, chain_product)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16 → [rows, out] in the same dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        return self._streamed(x) if self._streamed.takes(x) else chain_product(x, *self._weight)
