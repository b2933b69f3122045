"""Rounding to nearest: matrices to the tensors that compressed-tensors files have of them, and activations as such
files ask for.

Scales are rounded to the dtype that they are stored in first, and codes made by what is stored. Tensors lie as
trtrun.linear.stored reads them. It knows numbers. It does not know models, or how a scale could be better than the
nearest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trtrun.linear.stored.forms import pack

Stored = Mapping[str, Tensor]
"""What a matrix is stored in, by the end of the tensor's name: "weight_scale"."""

FP8_MOST = 448.0
"""The largest E4M3 number."""
INT8_MOST = 127
BLOCK = 128
_INT4_MOST, _INT4_HALF = 15, 7
_LEAST = 1e-10
"""Of a scale: of rows that are all zero."""


def fp8_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scales of E4M3 codes: the model's; float32 in place of float16, in which small ones would lose digits."""
    return torch.float32 if dtype == torch.float16 else dtype


def round_fp8_channel(weight: Tensor, dtype: torch.dtype) -> Stored:
    """weight [out, in] float32 → E4M3 with a scale for each output feature [out, 1]."""
    scale = _stored_scale(weight.abs().amax(1, keepdim=True) / FP8_MOST, fp8_scale_dtype(dtype))
    return {"weight": _to_fp8(weight / scale.float()), "weight_scale": scale}


def round_fp8_block(weight: Tensor, dtype: torch.dtype) -> Stored:
    """weight [out, in] float32 → E4M3 with a scale for each block of BLOCK by BLOCK [blocks, blocks]; the last ones of
    an axis may be smaller."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    # [blocks of rows, BLOCK, blocks of columns, BLOCK]
    blocks = torch.unflatten(torch.unflatten(padded, 1, (-1, BLOCK)), 0, (-1, BLOCK))
    scale = _stored_scale(blocks.abs().amax((1, 3)) / FP8_MOST, fp8_scale_dtype(dtype))
    codes = _to_fp8(blocks / scale.float()[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": codes[:rows, :columns].contiguous(), "weight_scale": scale}


def round_int8_channel(weight: Tensor, dtype: torch.dtype) -> Stored:
    """weight [out, in] float32 → int8 with a scale for each output feature [out, 1], symmetric."""
    scale = _stored_scale(weight.abs().amax(1, keepdim=True) / INT8_MOST, dtype)
    codes = (weight / scale.float()).round_().clamp_(-INT8_MOST - 1, INT8_MOST)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def int4_grid(groups: Tensor, dtype: torch.dtype, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """groups [..., size] float32 → (scale, zero) of each, float32 [..., 1]: the range from the least number to the
    largest, zero within it, in 15 steps; where it is symmetric, the largest number of either sign in 7. `zero` is the
    code of 0, a whole number."""
    if is_symmetric:
        scale = _stored_scale(groups.abs().amax(-1, keepdim=True) / _INT4_HALF, dtype).float()
        return scale, torch.full_like(scale, _INT4_MOST - _INT4_HALF)
    least, most = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    scale = _stored_scale((most - least) / _INT4_MOST, dtype).float()
    return scale, (-least / scale).round_().clamp_(0, _INT4_MOST)


def int4_codes(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The code of each number, a whole number from 0 to 15 as float32."""
    return (groups / scale).round_().add_(zero).clamp_(0, _INT4_MOST)


def nearest_int4(weight: Tensor, group_size: int, dtype: torch.dtype, is_symmetric: bool) -> Tensor:
    """What `round_int4`, or `round_int4_pairs`, makes of weight [out, in] float32, as numbers."""
    groups = torch.unflatten(weight, 1, (-1, group_size))
    scale, zero = int4_grid(groups, dtype, is_symmetric)
    return int4_codes(groups, scale, zero).sub_(zero).mul_(scale).flatten(1)


def round_int4(weight: Tensor, group_size: int, dtype: torch.dtype) -> Stored:
    """weight [out, in] float32 → codes of 4 bits with a scale and a zero point for each group of input features, packed
    as pack-quantized has them. `out` and `in` are multiples of 8, and `in` of the group."""
    groups = torch.unflatten(weight, 1, (-1, group_size))
    scale, zero = int4_grid(groups, dtype, is_symmetric=False)
    codes = int4_codes(groups, scale, zero).flatten(1).to(torch.int32)
    zeros = zero.squeeze(-1).to(torch.int32)
    return {
        "weight_packed": pack(codes, 4),
        "weight_scale": scale.squeeze(-1).to(dtype),
        "weight_zero_point": pack(zeros.T, 4).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def round_int4_pairs(weight: Tensor, group_size: int, dtype: torch.dtype) -> Stored:
    """weight [out, in] float32 → codes from -8 to 7 of two output features in a byte, with a scale for each group of
    input features, as ModelOpt has them. `out` is even."""
    groups = torch.unflatten(weight, 1, (-1, group_size))
    scale, zero = int4_grid(groups, dtype, is_symmetric=True)
    codes = int4_codes(groups, scale, zero).sub_(zero).flatten(1).to(torch.int8)
    pairs = (codes[0::2] & 15) | (codes[1::2] << 4)
    return {"weight": pairs.view(torch.uint8), "weight_scale": scale.squeeze(-1).to(dtype)}


def round_fp8_tensor(weight: Tensor, largest: Tensor) -> Stored:
    """weight [out, in] float32 → E4M3 with one scale [], by the largest number of what shares it."""
    scale = _stored_scale(largest / FP8_MOST, torch.float32)
    return {"weight": _to_fp8(weight / scale), "weight_scale": scale}


def round_fp8_static(inputs: Tensor, scale: Tensor) -> Tensor:
    """Activations [..., features] in E4M3 by a scale that was calibrated, float32 []."""
    return (_to_fp8(inputs.float() / scale).float() * scale).to(inputs.dtype)


def round_fp8_tokens(inputs: Tensor) -> Tensor:
    """Activations [..., features] in E4M3, each token by its largest number (dynamic, per token)."""
    return _rounded(inputs, FP8_MOST, is_float=True)


def round_fp8_groups(inputs: Tensor) -> Tensor:
    """The same, each BLOCK features of a token by their own."""
    features = inputs.shape[-1]
    groups = torch.unflatten(F.pad(inputs, (0, -features % BLOCK)), -1, (-1, BLOCK))
    return _rounded(groups, FP8_MOST, is_float=True).flatten(-2)[..., :features]


def round_int8_tokens(inputs: Tensor) -> Tensor:
    """Activations [..., features] in whole numbers of 8 bits, each token by its largest number."""
    return _rounded(inputs, INT8_MOST, is_float=False)


def _rounded(inputs: Tensor, most: float, is_float: bool) -> Tensor:
    wide = inputs.float()
    scale = (wide.abs().amax(-1, keepdim=True) / most).clamp_(min=_LEAST)
    codes = wide / scale
    codes = _to_fp8(codes).float() if is_float else codes.round_()
    return (codes * scale).to(inputs.dtype)


def _to_fp8(numbers: Tensor) -> Tensor:
    return numbers.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the file; 1 where it would be 0, as of numbers that are all 0."""
    rounded = scale.to(dtype)
    return torch.where(rounded.float() > _LEAST, rounded, torch.ones_like(rounded))
