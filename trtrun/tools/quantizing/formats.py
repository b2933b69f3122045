"""The formats that checkpoints are quantized to: what config.json says of them, and how a matrix is rounded to nearest.

They are those of compressed-tensors (its quant_scheme, 0.20): fp8 is FP8_DYNAMIC, fp8_block is FP8_BLOCK, int4_awq is
W4A16_ASYM, int8_sq is W8A8; or ModelOpt's, which TensorRT-LLM's checkpoints have: FP8 and W4A16_AWQ. Scales are rounded
to the dtype that they are stored in first, and codes made by what is stored. Tensors lie as trtrun.linear.stored reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtrun.linear.stored.forms import pack
from trtrun.tools.quantizing.settings import QuantizingSettings

Stored = Mapping[str, Tensor]
"""What a matrix is stored in, by the end of the tensor's name: "weight_scale"."""

FP8_MOST = 448.0
"""The largest E4M3 number."""
INT8_MOST = 127
BLOCK = 128
_INT4_MOST, _INT4_HALF = 15, 7
_LEAST = 1e-10
"""The least scale, which rows that are all zero have."""


def fp8_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scales of E4M3 codes: the model's; float32 in place of float16, in which small ones would lose
    digits."""
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
    """Convert a scale to the dtype of the file; 1 where it would be 0, as of numbers that are all 0."""
    rounded = scale.to(dtype)
    return torch.where(rounded.float() > _LEAST, rounded, torch.ones_like(rounded))


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_WHOLE = {"num_bits": 8, "type": "int", "symmetric": True}
_PER_TOKEN = {"strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        kind: of its files, in the words of compressed-tensors; or `quant_algo` in ModelOpt's.
        weights: compressed-tensors' arguments of weights, but for the size of groups; empty in ModelOpt's words.
        activations: those of activations; None where they stay as they are, or have a scale in the files.
        rounding: what is done to activations; None where they stay as they are, or have a scale in the files.
        round: weight [out, in] float32, size of groups, dtype of scales → what is stored; None where scales are shared.
        has_groups: whether input features share scales in groups of a size that is chosen.
        is_symmetric: whether codes have no zero points.
        has_static_scales: whether there is one scale for a matrix, shared by queries, keys and values, and one for its
            activations.
    """

    kind: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    rounding: Callable[[Tensor], Tensor] | None = None
    round: Callable[[Tensor, int, torch.dtype], Stored] | None = None
    has_groups: bool = False
    is_symmetric: bool = True
    has_static_scales: bool = False


_COMPRESSED: dict[str, Format] = {
    "fp8": Format(
        "float-quantized",
        {**_FLOAT, "strategy": "channel", "dynamic": False},
        {**_FLOAT, **_PER_TOKEN},
        round_fp8_tokens,
        lambda weight, _, dtype: round_fp8_channel(weight, dtype),
    ),
    "fp8_block": Format(
        "float-quantized",
        {**_FLOAT, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
        {**_FLOAT, "strategy": "group", "group_size": BLOCK, "dynamic": True},
        round_fp8_groups,
        lambda weight, _, dtype: round_fp8_block(weight, dtype),
    ),
    "int4_awq": Format(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "dynamic": False},
        round=round_int4,
        has_groups=True,
        is_symmetric=False,
    ),
    "int8_sq": Format(
        "int-quantized",
        {**_WHOLE, "strategy": "channel", "dynamic": False},
        {**_WHOLE, **_PER_TOKEN},
        round_int8_tokens,
        lambda weight, _, dtype: round_int8_channel(weight, dtype),
    ),
}

_MODELOPT: dict[str, Format] = {
    "fp8": Format("FP8", {}, has_static_scales=True),
    "int4_awq": Format("W4A16_AWQ", {}, round=round_int4_pairs, has_groups=True),
}


def find_format(settings: QuantizingSettings) -> Format:
    """The format that settings ask for, in the words of their layout."""
    return (_COMPRESSED if settings.layout == "compressed-tensors" else _MODELOPT)[settings.format]


KV_SCHEMES: dict[str, Mapping[str, Any]] = {
    "fp8": {**_FLOAT, "strategy": "tensor", "dynamic": False},
    "int8": {**_WHOLE, "strategy": "tensor", "dynamic": False},
}
"""`kv_cache_scheme`: one scale for the keys of a layer, and one for its values."""


def quantization_config(
    made: Format, group_sizes: Mapping[str, int], kv_cache: str | None, ignored: Sequence[str]
) -> dict[str, Any]:
    """What config.json says of a quantized checkpoint.

    Args:
        made: of its matrices.
        group_sizes: by the last name of each module that is quantized, such as "down_proj".
        kv_cache: a name of KV_SCHEMES, or None.
        ignored: modules that stay plain.
    """
    scheme = None if kv_cache is None else dict(KV_SCHEMES[kv_cache])
    if not made.weights:
        sizes = {"group_size": min(group_sizes.values())} if made.has_groups else {}
        section = {"quant_method": "modelopt", "quant_algo": made.kind, "ignore": list(ignored), **sizes}
        return section if scheme is None else {**section, "kv_cache_scheme": scheme}
    by_size = sorted(set(group_sizes.values()), reverse=True) if made.has_groups else [0]
    groups = {}
    for index, size in enumerate(by_size):
        names = sorted(name for name, own in group_sizes.items() if own == size)
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(by_size) == 1 else [f"re:.*\\.{name}$" for name in names],
            "weights": {**made.weights, "group_size": size} if made.has_groups else dict(made.weights),
            "input_activations": None if made.activations is None else dict(made.activations),
            "output_activations": None,
            "format": made.kind,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": made.kind,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": scheme,
    }
