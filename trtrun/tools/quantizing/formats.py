"""The formats that checkpoints are quantized to: what config.json says of them, and how a matrix is rounded.

They are those of compressed-tensors (its quant_scheme, 0.20): fp8 is FP8_DYNAMIC, fp8_block is FP8_BLOCK, int4_awq is
W4A16_ASYM, int8_sq is W8A8; or ModelOpt's, which TensorRT-LLM's checkpoints have: FP8 and W4A16_AWQ. It knows JSON
values and modules' names. It does not know how scales are searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtrun.tools.quantizing.rounding import (
    BLOCK,
    Stored,
    round_fp8_block,
    round_fp8_channel,
    round_fp8_groups,
    round_fp8_tokens,
    round_int4,
    round_int4_pairs,
    round_int8_channel,
    round_int8_tokens,
)
from trtrun.tools.quantizing.settings import QuantizingSettings

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
