"""MXFP4 in torch's own operations: numbers of 4 bits (E2M1) with a power of two for each 32 columns (E8M0), as OCP's
Microscaling Formats 1.0 has them. Every number that they make is one of bfloat16."""

from __future__ import annotations

import torch

BLOCK = 32
"""Columns that share a power of two."""

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_LARGEST_EXPONENT = 2  # of numbers: 4.0 and 6.0


def quantize_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round weight [out, in], `in` a multiple of BLOCK, to nearest: "codes" uint8 [out, in / 2], the even column in the
    lower bits, and "scales" uint8 [out, in / BLOCK], exponents plus 127."""
    blocks = weight.float().view(len(weight), -1, BLOCK)
    exponent = blocks.abs().amax(2).clamp(min=2.0**-100).log2().floor() - _LARGEST_EXPONENT
    scaled = (blocks * torch.exp2(-exponent).unsqueeze(2)).flatten(1)
    numbers = torch.tensor(_NUMBERS, device=weight.device)
    # Between neighbours, the middle goes up.
    found = torch.bucketize(scaled.abs(), (numbers[1:] + numbers[:-1]) / 2, right=True)
    codes = (found + 8 * (scaled < 0)).to(torch.uint8)
    return {"codes": codes[:, ::2] | (codes[:, 1::2] << 4), "scales": (exponent + _EXPONENT_BIAS).to(torch.uint8)}
