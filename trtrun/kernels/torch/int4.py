"""Weights of 4 bits with a scale and a zero point for each group of 32, 64 or 128 inputs: how they lie in memory on
GPUs, and the product with them by torch's operations, right on any device.

Codes lie in the order in which the threads that feed the matrix units of a GPU hold them (PTX ISA, "Register Fragments
for wgmma.mma_async.m64nNk16"), so that kernels read words and never move codes between threads: trtrun.kernels.triton
has them. It knows numbers. It does not know files, layers or kernels.
"""

from __future__ import annotations

import torch

TILE, GROUP, STEP = 64, 128, 512
"""Output features that lie together, and inputs: of a group of words, and of a step of groups."""

_CODES = 16
BFLOAT16_UNIT, FLOAT16_UNIT = 2.0**-6, 2.0**-9
UNITS = {torch.bfloat16: BFLOAT16_UNIT, torch.float16: FLOAT16_UNIT}
"""What kernels widen a code of 1 to: the least number of a dtype is that of a single low bit, and this is its product
with nearly the largest power of two."""


def words_shape(features: int, inputs: int) -> tuple[int, int, int, int]:
    """Of the words of a weight [features, inputs], int32: [tiles, steps, 128, 32].

    For 128 inputs each, one behind the other, 1,024 words. Word 512 v + 128 w + 32 l + 16 e + 4 p +
    2 q + h of a group is of the tile's feature 16 w + 8 v + 2 l + e; its lower half has the codes of inputs 16 (4 h +
    j) + 8 q + 2 p for j from 0 to 3, 4 bits each, the lowest first; its upper half those of the inputs behind them.
    """
    return -(-features // TILE), -(-inputs // STEP), STEP // 4, 32


def scales_shape(features: int, inputs: int, size: int) -> tuple[int, int, int, int]:
    """Of the scales, int32: [tiles, steps, 1024 / size, 32], for each `size` inputs 64 features one behind the other.

    In the lower half is the scale, in the upper one the negative zero point times a power of two (`UNITS`), both in the
    dtype of activations.
    """
    return -(-features // TILE), -(-inputs // STEP), STEP // size * TILE // 32, 32


def groups_of(scales: torch.Tensor) -> int:
    """How many groups 128 inputs have, told by the shape of the scales."""
    return scales.shape[2] * 32 * GROUP // (STEP * TILE)


def pack(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int) -> dict[str, torch.Tensor]:
    """Codes, scales and zero points as they lie in memory.

    Args:
        codes: [features, inputs] of any integer dtype, from 0 to 15; inputs are a multiple of 128.
        scale: [features, groups] in the dtype of activations, bfloat16 or float16; inputs / groups are 32, 64 or 128.
        zero: as scale, whole numbers from 0 to 15 of any dtype, or one for all.

    Returns:
        "words" and "scales", see `words_shape` and `scales_shape`: a weight is (code - zero) * scale, rounded to the
        dtype of activations. What fills up the last tile and step is zero.
    """
    features, inputs = codes.shape
    tiles, steps, _, _ = shape = words_shape(features, inputs)
    filled = codes.new_zeros((tiles * TILE, steps * STEP), dtype=torch.int32)
    filled[:features, :inputs] = codes
    # features: tile, w, v, l, e; inputs: group, h, j, q, p, and which of a pair
    parts = filled.view(tiles, 4, 2, 4, 2, steps * 4, 2, 4, 2, 4, 2)
    del filled
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=codes.device).view(4, 1, 1, 1)
    shifts = shifts + torch.tensor([0, 16], dtype=torch.int32, device=codes.device)
    words = (parts << shifts).sum((7, 10), dtype=torch.int32)  # tile, w, v, l, e, group, h, q, p
    words = words.permute(0, 5, 2, 1, 3, 4, 8, 7, 6).reshape(shape)
    groups = scale.shape[1]
    size = inputs // groups
    both = torch.zeros((2, tiles * TILE, steps * (STEP // size)), dtype=scale.dtype, device=codes.device)
    both[0, :features, :groups] = scale
    unit = UNITS[scale.dtype]
    both[1, :features, :groups] = zero * -unit
    low, high = both.view(torch.int16).int()
    joined = (low & 0xFFFF) | (high << 16)
    scales = joined.view(tiles, TILE, -1).transpose(1, 2).reshape(scales_shape(features, inputs, size))
    return {"words": words, "scales": scales}


def quantize(weight: torch.Tensor, size: int = GROUP) -> dict[str, torch.Tensor]:
    """A dense weight [features, inputs] of half precision, each `size` of its inputs scaled so that its largest number
    becomes 7 and rounded to nearest: see `pack`."""
    grouped = weight.reshape(weight.shape[0], -1, size)
    scale = (grouped.abs().amax(-1, keepdim=True).float() / 7).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (grouped.float() / scale.float()).round_().clamp_(-8, 7).int().add_(8)
    return pack(codes.view(weight.shape), scale.squeeze(-1), 8)


def dequantize(words: torch.Tensor, scales: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [features, inputs] in `dtype`, that of activations; features are all of the tiles'."""
    tiles, steps = words.shape[:2]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device).view(4, 1)
    shifts = shifts + torch.tensor([0, 16], dtype=torch.int32, device=words.device)
    # tile, group, v, w, l, e, p, q, h; then j, and which of a pair
    codes = (words.view(tiles, steps * 4, 2, 4, 4, 2, 4, 2, 2, 1, 1) >> shifts) & (_CODES - 1)
    both = scales.view(tiles, -1, TILE).transpose(1, 2).reshape(tiles * TILE, -1, 1)
    codes = codes.permute(0, 3, 2, 4, 5, 1, 8, 9, 7, 6, 10).reshape(*both.shape[:2], -1)
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
