"""Numbers of 4 bits with an exponent (E2M1) that share a scale in blocks, in torch's own operations: MXFP4 with blocks
of 32 and powers of two (E8M0, OCP's Microscaling Formats 1.0), NVFP4 with blocks of 16 and scales in E4M3.

A weight is number * scale of its block * factor of its output feature. Words hold the codes that those of whole numbers
do (integers.py), but the bits of each lie where few operations make a bfloat16 of it (`spread_bits`). A scale is a byte
of what makes one of bfloat16: its exponent, or with blocks of 16 five bits of it and three of its mantissa. The product
of a number and a scale so is one of bfloat16, too: nothing is rounded but sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from trtrun.kernels.torch import integers
from trtrun.kernels.torch.integers import GROUP, TILE, pack_words, unpack_words

MXFP4_BLOCK, NVFP4_BLOCK = 32, 16
"""Columns that share a scale."""

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_LARGEST_EXPONENT = 2  # of numbers: 4.0 and 6.0
UNIT_EXPONENT = -126
"""A code as the low bits of a bfloat16 is its number times two to this."""

_MOST_BYTE = 254
_LOWEST = 0x10001
"""The lowest bit of each half of a word."""

_FINE_EXPONENT = UNIT_EXPONENT + 9
"""What scales in E4M3 are divided by, as a power of two, so that five bits hold their exponents."""


class ScaleForm(NamedTuple):
    """How a byte becomes the bits of a bfloat16: shifted, then added to."""

    shift: int
    offset: int


FORMS = {MXFP4_BLOCK: ScaleForm(7, 0), NVFP4_BLOCK: ScaleForm(4, 221 << 7)}
"""By the size of blocks."""


def scales_shape(features: int, inputs: int, size: int) -> tuple[int, int, int, int]:
    """Shape of the scales, uint8: [tiles, groups of 128 inputs, 64, blocks of a group]."""
    return -(-features // TILE), -(-inputs // GROUP), TILE, GROUP // size


def pack(codes: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor | float, size: int) -> dict[str, torch.Tensor]:
    """Codes and scales as they lie in memory.

    Args:
        codes: [features, inputs] of any integer dtype, from 0 to 15, the highest bit the sign.
        scale: [features, blocks]: exponents plus 127 in uint8 for blocks of 32, E4M3 for blocks of 16.
        whole: what all scales are multiplied by besides, [] float32 or a number.
        size: columns of a block, 16 or 32.

    Returns:
        "words" (see `integers.words_shape`, with steps of 128 inputs), "blocks" (`scales_shape`) and "factor"
        [features] float32.
    """
    features, inputs = codes.shape
    if size == MXFP4_BLOCK:
        most = scale.max() if scale.numel() else scale.new_tensor(_MOST_BYTE)
        held = (scale.int() + (_MOST_BYTE - most.int())).to(torch.uint8)
        factor = torch.ldexp(torch.ones((), device=codes.device), most.int() - _EXPONENT_BIAS - 1) * whole
    else:
        sizes = scale.float()
        codes = torch.where(_spread(sizes < 0, size, inputs), codes ^ 8, codes)
        codes = torch.where(_spread(sizes == 0, size, inputs), torch.zeros_like(codes), codes)
        bits = (sizes.abs() * 2.0**-_FINE_EXPONENT).bfloat16().view(torch.int16).int()
        held = torch.where(sizes == 0, 0, (bits - FORMS[size].offset) >> FORMS[size].shift).to(torch.uint8)
        factor = torch.as_tensor(whole, device=codes.device) * 2.0 ** (_FINE_EXPONENT - UNIT_EXPONENT)
    shape = scales_shape(features, inputs, size)
    blocks = held.new_zeros((shape[0] * TILE, shape[1] * shape[3]))
    blocks[:features, : scale.shape[1]] = held
    return {
        "words": spread_bits(pack_words(codes, GROUP)),
        "blocks": blocks.view(shape[0], TILE, shape[1], shape[3]).transpose(1, 2).contiguous(),
        "factor": factor.float().expand(features).contiguous(),
    }


def _spread(of_blocks: torch.Tensor, size: int, inputs: int) -> torch.Tensor:
    """[features, blocks] → [features, inputs]."""
    return of_blocks.repeat_interleave(size, 1)[:, :inputs]


def dequantize(tensors: Mapping[str, torch.Tensor], features: int, inputs: int) -> torch.Tensor:
    """The weight [features, inputs] float32 of what `pack` made."""
    blocks = tensors["blocks"]
    size = GROUP // blocks.shape[3]
    codes = unpack_words(gather_bits(tensors["words"]))[:features, :inputs]
    numbers = torch.tensor((*_NUMBERS, *(-it for it in _NUMBERS)), device=codes.device)[codes.long()]
    form = FORMS[size]
    bits = (blocks.int() << form.shift) + form.offset
    scale = (bits << 16).view(torch.float32).transpose(1, 2).flatten(0, 1).flatten(1)[:features]
    # In this order nothing that is one of float32 is lost on the way.
    scaled = numbers * _spread(scale * 2.0**UNIT_EXPONENT, size, inputs)
    return scaled * tensors["factor"][:features].unsqueeze(1)


def spread_bits(words: torch.Tensor) -> torch.Tensor:
    """Words of codes, four in each half, to those whose codes are taken out by a mask: of the first the sign is bit 15
    of the half and the rest bits 8 to 6, as a bfloat16 has them; the second and the third lie 3 and 6 bits lower. Of
    the last the sign is bit 14, and the rest are bits 11, 10 and 13."""
    spread = torch.zeros_like(words)
    for place in range(4):
        code = words >> (4 * place)
        sign, rest = (code >> 3) & _LOWEST, code & (7 * _LOWEST)
        if place < 3:
            spread |= (sign << (15 - 3 * place)) | (rest << (6 - 3 * place))
        else:
            spread |= (sign << 14) | (((rest >> 1) & (3 * _LOWEST)) << 10) | ((rest & _LOWEST) << 13)
    return spread


def gather_bits(words: torch.Tensor) -> torch.Tensor:
    """What `spread_bits` was given."""
    gathered = torch.zeros_like(words)
    for place in range(4):
        if place < 3:
            sign, rest = words >> (15 - 3 * place), (words >> (6 - 3 * place)) & (7 * _LOWEST)
        else:
            sign, rest = words >> 14, ((words >> 9) & (6 * _LOWEST)) | ((words >> 13) & _LOWEST)
        gathered |= (((sign & _LOWEST) << 3) | rest) << (4 * place)
    return gathered


def quantize_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round weight [out, in], `in` a multiple of 32, to nearest: "codes" uint8 [out, in] and "scales" uint8 [out,
    in / 32], exponents plus 127."""
    blocks = weight.float().view(len(weight), -1, MXFP4_BLOCK)
    exponent = blocks.abs().amax(2).clamp(min=2.0**-100).log2().floor() - _LARGEST_EXPONENT
    scaled = (blocks * torch.exp2(-exponent).unsqueeze(2)).flatten(1)
    return {"codes": nearest_codes(scaled), "scales": (exponent + _EXPONENT_BIAS).to(torch.uint8)}


def quantize_nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round weight [out, in], `in` a multiple of 16, to nearest: "codes" uint8 [out, in], "scales" E4M3 [out, in / 16]
    and "whole" [] float32."""
    blocks = weight.float().view(len(weight), -1, NVFP4_BLOCK)
    whole = (blocks.abs().max() / (448 * _NUMBERS[-1])).clamp(min=2.0**-100)
    scale = (blocks.abs().amax(2) / (_NUMBERS[-1] * whole)).to(torch.float8_e4m3fn)
    sizes = scale.float().masked_fill(scale.float() == 0, 1.0) * whole
    return {"codes": nearest_codes((blocks / sizes.unsqueeze(2)).flatten(1)), "scales": scale, "whole": whole}


def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number, uint8; between neighbours, the middle goes up."""
    known = torch.tensor(_NUMBERS, device=numbers.device)
    found = torch.bucketize(numbers.abs(), (known[1:] + known[:-1]) / 2, right=True)
    return (found + 8 * (numbers < 0)).to(torch.uint8)


class TorchExpertMatmul:
    """The product with one expert's codes of 4 bits, whole numbers or such with an exponent: they become dense for each
    product.

    Args:
        tensors: see `pack`, or `integers.pack`.
        features, inputs: of the weight.
        bias: [features] in the dtype of activations, or None.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], features: int, inputs: int, bias: torch.Tensor | None
    ) -> None:
        self._tensors, self._shape, self._bias = tensors, (features, inputs), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] bfloat16 or float16 → [rows, features] in the same dtype."""
        return torch.nn.functional.linear(x, self.weight(x.dtype), self._bias)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [features, inputs]; `dtype` is that of activations."""
        (features, inputs), words = self._shape, self._tensors["words"]
        if "blocks" in self._tensors:
            return dequantize(self._tensors, features, inputs).to(dtype)
        return integers.dequantize(words, self._tensors["scales"], inputs, dtype)[:features]
