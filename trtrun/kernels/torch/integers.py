"""Weights of 8 and of 4 bits as whole numbers, and the products with them in plain torch operations, right on any
device.

Weights of 4 bits have a scale and a zero point for each group of 32, 64 or 128 inputs. Their codes lie in the order in
which the threads that feed the matrix units of a GPU hold them (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"), so that kernels read words and never move codes between threads.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtrun.tensors import numbers_at_a_time

TILE, GROUP, STEP = 64, 128, 512
"""Output features that lie together, and inputs: of a group of words, and of a step of groups."""

_CODES = 16
BFLOAT16_UNIT, FLOAT16_UNIT = 2.0**-6, 2.0**-9
UNITS = {torch.bfloat16: BFLOAT16_UNIT, torch.float16: FLOAT16_UNIT}
"""What kernels widen a code of 1 to: the least number of a dtype is that of a single low bit, and this is its product
with nearly the largest power of two."""


def words_shape(features: int, inputs: int, step: int = STEP) -> tuple[int, int, int, int]:
    """Shape of the words of a weight [features, inputs], int32: [tiles, steps, step / 4, 32].

    For 128 inputs each, one behind the other, 1,024 words. Word 512 v + 128 w + 32 l + 16 e + 4 p +
    2 q + h of a group is of the tile's feature 16 w + 8 v + 2 l + e; its lower half has the codes of inputs 16 (4 h +
    j) + 8 q + 2 p for j from 0 to 3, 4 bits each, the lowest first; its upper half those of the inputs behind them.
    """
    return -(-features // TILE), -(-inputs // step), step // 4, 32


def scales_shape(features: int, inputs: int, size: int, step: int = STEP) -> tuple[int, int, int, int]:
    """Shape of the scales, int32: [tiles, steps, step / size * 2, 32], for each `size` inputs 64 features one behind
    the other.

    In the lower half is the scale, in the upper one the negative zero point times a power of two (`UNITS`), both in the
    dtype of activations.
    """
    return -(-features // TILE), -(-inputs // step), step // size * TILE // 32, 32


def groups_of(scales: torch.Tensor) -> int:
    """How many groups 128 inputs have, told by the shape of the scales."""
    return scales.shape[2] * 32 * GROUP // (STEP * TILE)


def pack_words(codes: torch.Tensor, step: int = STEP) -> torch.Tensor:
    """The words of codes [features, inputs] of any integer dtype, from 0 to 15: see `words_shape`."""
    features, inputs = codes.shape
    tiles, steps, _, _ = shape = words_shape(features, inputs, step)
    filled = codes.new_zeros((tiles * TILE, steps * step), dtype=torch.int32)
    filled[:features, :inputs] = codes
    # features: tile, w, v, l, e; inputs: group, h, j, q, p, and which of a pair
    parts = filled.view(tiles, 4, 2, 4, 2, steps * step // GROUP, 2, 4, 2, 4, 2)
    del filled
    words = (parts << _shifts(codes.device).view(4, 1, 1, 2)).sum((7, 10), dtype=torch.int32)
    # tile, w, v, l, e, group, h, q, p
    return words.permute(0, 5, 2, 1, 3, 4, 8, 7, 6).contiguous().view(shape)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Words [tiles, steps, step / 4, 32] → codes [features, inputs] int32, of all the tiles."""
    tiles = len(words)
    # tile, group, v, w, l, e, p, q, h; then j, and which of a pair
    codes = (words.reshape(tiles, -1, 2, 4, 4, 2, 4, 2, 2, 1, 1) >> _shifts(words.device)) & (_CODES - 1)
    return codes.permute(0, 3, 2, 4, 5, 1, 8, 9, 7, 6, 10).reshape(tiles * TILE, -1)


def _shifts(device: torch.device) -> torch.Tensor:
    """Where in a word codes lie: [4, 2] int32."""
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=device).view(4, 1)
    return shifts + torch.tensor([0, 16], dtype=torch.int32, device=device)


def pack(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int, step: int = STEP
) -> dict[str, torch.Tensor]:
    """Codes, scales and zero points as they lie in memory.

    Args:
        codes: [features, inputs] of any integer dtype, from 0 to 15; inputs are a multiple of 128.
        scale: [features, groups] in the dtype of activations, bfloat16 or float16; inputs / groups are 32, 64 or 128.
        zero: as scale, whole numbers from 0 to 15 of any dtype, or one for all.
        step: of inputs, which the last is filled up to.

    Returns:
        "words" and "scales", see `words_shape` and `scales_shape`: a weight is (code - zero) * scale, rounded to the
        dtype of activations. What fills up the last tile and step is zero.
    """
    features, inputs = codes.shape
    groups = scale.shape[1]
    size = inputs // groups
    shape = scales_shape(features, inputs, size, step)
    both = torch.zeros((2, shape[0] * TILE, shape[1] * (step // size)), dtype=scale.dtype, device=codes.device)
    both[0, :features, :groups] = scale
    unit = UNITS[scale.dtype]
    both[1, :features, :groups] = zero * -unit
    low, high = both.view(torch.int16).int()
    joined = (low & 0xFFFF) | (high << 16)
    scales = joined.view(shape[0], TILE, -1).transpose(1, 2).contiguous().view(shape)
    return {"words": pack_words(codes, step), "scales": scales}


def quantize_int4(weight: torch.Tensor, size: int = GROUP, step: int = STEP) -> dict[str, torch.Tensor]:
    """A dense weight [features, inputs] of half precision, each `size` of its inputs scaled so that its largest number
    becomes 7 and rounded to nearest: see `pack`."""
    grouped = weight.reshape(weight.shape[0], -1, size)
    scale = (grouped.abs().amax(-1, keepdim=True).float() / 7).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (grouped.float() / scale.float()).round_().clamp_(-8, 7).int().add_(8)
    return pack(codes.view(weight.shape), scale.squeeze(-1), 8, step)


def dequantize(words: torch.Tensor, scales: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [features, inputs] in `dtype`, that of activations; features are all of the tiles'."""
    tiles = len(words)
    both = scales.view(tiles, -1, TILE).transpose(1, 2).reshape(tiles * TILE, -1, 1)
    codes = unpack_words(words).view(*both.shape[:2], -1)
    low, high = ((half & 0xFFFF).to(torch.int16).view(dtype).float() for half in (both, both >> 16))
    weight = codes.float().add_(high / UNITS[dtype]).mul_(low).to(dtype)
    return weight.view(tiles * TILE, -1)[:, :inputs]


class TorchInt4Matmul:
    """The product with one weight of 4 bits: it becomes dense for each product.

    Args:
        words, scales: see `pack`.
        bias: [features] in the dtype of activations, or None.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._words, self._scales, self._bias = words, scales, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] bfloat16 or float16 → [rows, features] in the same dtype."""
        weight = dequantize(self._words, self._scales, x.shape[1], x.dtype)
        y = torch.nn.functional.linear(x, weight)
        return y if self._bias is None else y.add_(self._bias)


_FEW_ROWS = 4
"""Rows up to which torch's product of int8 is faster than a product of widened weights (measured on Zen 5)."""
_TORCH_STEP = 32
"""Input features that torch's product takes at a time: others it reads past the end of, without a word."""

_LARGEST = 127


def quantize_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [out, in] of any float dtype → codes [out, in] int8 and scale [out] float32 on its device."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, numbers_at_a_time(weight.device) // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        largest = part.abs().amax(dim=1)
        factor = torch.where(largest > 0, largest / _LARGEST, 1.0)
        codes[start : start + rows] = part.div_(factor.unsqueeze(1)).round_()
        scale[start : start + rows] = factor
    return {"codes": codes, "scale": scale}


class TorchInt8Matmul:
    """x @ (codes * scale).T + bias in plain torch operations: any number of rows, dtype of activations and device.

    Args:
        codes: [out, in] int8.
        scale: [out] float32.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        # The factors of torch's operation would have to be of x's dtype, which rounds them.
        has_product = codes.device.type == "cpu" and codes.shape[1] % _TORCH_STEP == 0
        self._ones = torch.ones(codes.shape[0], dtype=torch.bfloat16) if has_product else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        if self._ones is not None and 0 < x.shape[0] <= _FEW_ROWS:
            sums = torch._weight_int8pack_mm(x.contiguous(), self._codes, self._ones)
        else:
            sums = functional.linear(x, self._codes.to(x.dtype))
        scaled = sums * self._scale
        return (scaled if self._bias is None else scaled.add_(self._bias)).to(x.dtype)
