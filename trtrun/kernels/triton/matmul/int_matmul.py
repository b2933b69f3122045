"""Products with weights of 8 and of 4 bits as Triton kernels for CUDA: few rows at the speed at which codes are read.

Codes of 8 bits become the dtype of activations on the way to the tensor cores, which every integer of 8 bits can; sums
are float32. With codes of 4 bits the matrix units sum up activations times codes less their zero point, which are
exact, for the inputs that share a scale; such sums, times the scale, are added up in float32, in the order of the
inputs. So no weight is rounded but by the checkpoint itself, and neither the tile nor the number of rows can be seen in
a result. On compute capability 9.0 another kernel for 4 bits is faster (int4_stream), with the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch.integers import GROUP, STEP, TILE, UNITS, TorchInt8Matmul, groups_of
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.int4_stream.suitability import Streamed

_MOST_ROWS = 64
"""Beyond them the product is arithmetic: widening the whole weight once and leaving it to cuBLAS is then faster."""
_NARROWEST = 16
"""What a tile of the tensor cores takes."""
_MANY_FEATURES = 8192


@triton.jit
def _int8_product_kernel(
    x, codes, scale, bias, y, rows, features, inputs, x_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    feature = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    kind = x.dtype.element_ty
    is_row, is_feature = row < rows, feature < features
    total = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        number = start + tl.arange(0, INPUTS)
        is_input = number < inputs
        values = tl.load(
            x + row[:, None] * x_stride + number[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        weights = tl.load(
            codes + feature[None, :] * inputs + number[:, None], mask=is_feature[None, :] & is_input[:, None], other=0
        )
        total = tl.dot(values, weights.to(kind), total)
    total *= tl.load(scale + feature, mask=is_feature, other=0.0)[None, :]
    if ADDS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    place = y + row[:, None] * features + feature[None, :]
    tl.store(place, total.to(kind), mask=is_row[:, None] & is_feature[None, :])


class TritonInt8Matmul:
    """The product with one weight of 8 bits on CUDA.

    Args:
        codes: [out, in] int8, contiguous.
        scale: [out] float32.
        bias: [out] or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self._many_rows = TorchInt8Matmul(codes, scale, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16 → [rows, out] in the same dtype."""
        rows = x.shape[0]
        if rows > _MOST_ROWS:
            return self._many_rows(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        features, inputs = self._codes.shape
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        if rows:
            tile = _tile(rows, features)
            _int8_product_kernel[(triton.cdiv(features, tile["FEATURES"]),)](
                x, self._codes, self._scale, self._scale if self._bias is None else self._bias, y,
                rows, features, inputs, x.stride(0),
                ROWS=max(_NARROWEST, triton.next_power_of_2(rows)), ADDS=self._bias is not None, num_warps=4, **tile,
            )  # fmt: skip
        return y


def _tile(rows: int, features: int) -> dict[str, int]:
    """What one program computes: enough programs to keep every multiprocessor reading, in runs of memory as long as
    that allows (measured on an H200, 1 and 16 rows); shorter ones where more rows fill the shared memory."""
    if rows > _NARROWEST:
        return {"FEATURES": 32, "INPUTS": 128, "num_stages": 3}
    if features >= _MANY_FEATURES:
        return {"FEATURES": 64, "INPUTS": 256, "num_stages": 4}
    return {"FEATURES": 32, "INPUTS": 512, "num_stages": 3}


_TILE, _GROUP, _WORDS = tl.constexpr(TILE), tl.constexpr(GROUP), tl.constexpr(TILE * GROUP // 8)

_FEWEST_ROWS, _WIDEST = 16, 64
"""Rows of a tile."""


@triton.jit
def read_words(words, at, SIZE: tl.constexpr):
    """Words of a tile for SIZE inputs, which are the `at`-th of all such: [64, SIZE / 2] int32, one for each pair of
    inputs; and which of four codes of each half is the pair's, [SIZE / 2] int32."""
    feature, pair = tl.arange(0, _TILE), tl.arange(0, SIZE // 2)
    in_group: tl.constexpr = _GROUP // SIZE
    place = words + (at // in_group).to(tl.int64) * _WORDS
    pair = at % in_group * (SIZE // 2) + pair
    of_feature = (feature >> 3 & 1) * 512 + (feature >> 4) * 128 + (feature >> 1 & 3) * 32 + (feature & 1) * 16
    of_pair = (pair & 3) * 4 + (pair >> 2 & 1) * 2 + (pair >> 5)
    found = tl.load(place + of_feature[:, None] + of_pair[None, :], eviction_policy="evict_first")
    return found, (pair >> 3 & 3).to(tl.int32)


@triton.jit
def read_codes(words, at, SIZE: tl.constexpr):
    """Codes of a tile for SIZE inputs, which are the `at`-th of all such: [64, SIZE] int32."""
    found, which = read_words(words, at, SIZE)
    found = found >> (which * 4)[None, :]
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
        codes = read_codes(words, tile * groups + group, SIZE).to(tl.float32) - zero[:, None]
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
        words, scales: see trtrun.kernels.torch.integers.
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
        words, scales: see trtrun.kernels.torch.integers.
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
