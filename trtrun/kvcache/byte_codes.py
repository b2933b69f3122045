"""Keys and values as numbers of 8 bits and scales, in plain torch operations: right on any device.

A head of a token, or its latent, is codes times a scale: codes of E4M3 (Micikevicius et al. 2022, arXiv:2209.05433) or
whole numbers from -127 to 127. The scale, by the head's largest number or the layer's own, has the bits of a bfloat16.
What comes back is the product, rounded once to the model's dtype. The kernels of trtrun/kernels/triton make the same
codes and scales; they multiply by scales behind their own products, which rounds less.

It knows heads of tokens. It does not know where they are kept (formats.py).
"""

from __future__ import annotations

from typing import Literal

import torch

CodeKind = Literal["fp8", "int8"]

LARGEST: dict[CodeKind, float] = {"fp8": 448.0, "int8": 127.0}
"""The largest code of each kind."""

LEAST_SCALE, MOST_SCALE = 2.0**-100, 127.5
"""Heads of zeros have the least. The most leaves kernels room for a factor of 2^120 beside it in a bfloat16; numbers
beyond 16,000 (int8) or 57,000 (fp8) are cut."""

SCALE_BYTES = 4
"""A scale is kept as a float32: GPUs copy no fewer bytes ahead of use."""

ALIGNED = 4
"""Where there are scales, a token has a multiple of so many bytes for its codes."""

_CODE_FACTOR = 2.0**120
"""E4M3 moved up by 4 bits is bfloat16, and by 20 bits a float32, divided by 2^120, below their least exponents too."""

_CODE_MOVES = {torch.bfloat16: (torch.int16, 4, -0x7810), torch.float32: (torch.int32, 20, -0x78100000)}
"""How codes are moved, sign-extended: as what, by how many bits, and a mask that keeps sign and magnitude (0x87F0)."""


def scales_of(rows: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """The scales of heads: rows [n, head] of any float dtype → float32 [n], numbers of bfloat16."""
    return as_scales(rows.float().abs().amax(dim=-1), kind)


def as_scales(largest: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Largest numbers of any shape → the scales that make the largest code of them, alike."""
    # By a tensor: on GPUs torch multiplies by the reciprocal of a number.
    scale = largest.float() / torch.full_like(largest, LARGEST[kind], dtype=torch.float32)
    return scale.clamp(LEAST_SCALE, MOST_SCALE).to(torch.bfloat16).float()


def to_codes(rows: torch.Tensor, scale: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """rows [n, head] of any float dtype and float32 scales [n] → codes uint8 [n, head], rounded to nearest even."""
    most = LARGEST[kind]
    whole = (rows.float() * scale.reciprocal().unsqueeze(-1)).clamp(-most, most)
    if kind == "fp8":
        return whole.to(torch.float8_e4m3fn).view(torch.uint8)
    return whole.round().to(torch.int8).view(torch.uint8)


def from_codes(codes: torch.Tensor, scale: torch.Tensor, kind: CodeKind, dtype: torch.dtype) -> torch.Tensor:
    """Codes uint8 [..., head] and float32 scales [...], numbers of bfloat16 → [..., head] of `dtype`."""
    # A product has no more bits than a float32 holds, and is rounded once, be it one of bfloat16.
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    numbers, factor = codes.view(torch.int8), scale.to(kept).unsqueeze(-1)
    if kind == "int8":
        return numbers.to(kept).mul_(factor).to(dtype)
    # Two to four times as fast as torch's own conversion.
    integers, shift, mask = _CODE_MOVES[kept]
    moved = numbers.to(integers).mul_(1 << shift).bitwise_and_(mask)
    return moved.view(kept).mul_(factor * _CODE_FACTOR).to(dtype)
