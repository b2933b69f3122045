"""The formats that checkpoints are quantized to: what config.json says of them, and how a matrix is rounded.

They are those of compressed-tensors (its quant_scheme, 0.20): fp8 is FP8_DYNAMIC, fp8_block is FP8_BLOCK, int4_awq is
W4A16_ASYM, int8_sq is W8A8. It knows JSON values and modules' names. It does not know how scales are searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtrun.quantizing.plain_layer import Rounding
from trtrun.quantizing.rounding import (
    BLOCK,
    Stored,
    round_fp8_block,
    round_fp8_channel,
    round_fp8_groups,
    round_fp8_tokens,
    round_int4,
    round_int8_channel,
    round_int8_tokens,
)

_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_WHOLE = {"num_bits": 8, "type": "int", "symmetric": True}
_PER_TOKEN = {"strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        kind: of its files, in the words of compressed-tensors.
        weights: its arguments of weights, but for the size of groups.
        activations: those of activations; None where they stay as they are.
        rounding: what these do to activations.
        round: weight [out, in] float32, size of groups, dtype of scales → what is stored.
        has_groups: whether input features share scales in groups of a size that is chosen.
    """

    kind: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    rounding: Rounding | None
    round: Callable[[Tensor, int, torch.dtype], Stored]
    has_groups: bool = False


FORMATS: dict[str, Format] = {
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
        None,
        None,
        round_int4,
        has_groups=True,
    ),
    "int8_sq": Format(
        "int-quantized",
        {**_WHOLE, "strategy": "channel", "dynamic": False},
        {**_WHOLE, **_PER_TOKEN},
        round_int8_tokens,
        lambda weight, _, dtype: round_int8_channel(weight, dtype),
    ),
}

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
    sizes = sorted(set(group_sizes.values()), reverse=True) if made.has_groups else [0]
    groups = {}
    for index, size in enumerate(sizes):
        names = sorted(name for name, own in group_sizes.items() if own == size)
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(sizes) == 1 else [f"re:.*\\.{name}$" for name in names],
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
        "kv_cache_scheme": None if kv_cache is None else dict(KV_SCHEMES[kv_cache]),
    }
