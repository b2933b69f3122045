"""What becomes of weights that a checkpoint has quantized, in words: for the plan, and for a line of the log at start.

It knows shapes and formats. It does not know who says it to whom.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trtrun.configuration.engine_directory import read_engine
from trtrun.kvcache.sizing import format_bytes
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import count_bytes
from trtrun.linear.stored.layout import StoredLinear
from trtrun.models.config import ModelConfig
from trtrun.models.weight_check import held_weights
from trtrun.models.weights import Share
from trtrun.tensors import dtype_name


def describe_weights(path: Path, config: ModelConfig, share: Share, dtype: torch.dtype, device_type: str) -> str | None:
    """What there is to say of a model's weights: of an engine what it was built for, of a quantized checkpoint see
    `describe_stored`; None of a plain one.

    Raises:
        CheckpointError: an engine is damaged; or as of `describe_stored`.
    """
    engine = read_engine(path)
    return engine.describe() if engine is not None else describe_stored(config, share, dtype, device_type)


def describe_stored(config: ModelConfig, share: Share, dtype: torch.dtype, device_type: str) -> str | None:
    """How a rank holds what the checkpoint has quantized, and in how many bytes; None where it is not quantized.

    Args:
        config: of the model.
        share: the rank's place.
        dtype: of activations.
        device_type: "cpu" or "cuda".

    Raises:
        CheckpointError: the model cannot be shared out over so many ranks.
    """
    sizes: dict[tuple[bool, str], int] = {}
    rounds = False
    for weight, held in held_weights(config, share, QUANTIZATIONS.get("none")):
        if isinstance(held, StoredLinear):
            kind = held.codes(weight, dtype, device_type) is not None, held.layout.name
            rounds |= kind[0] and held.layout.rounds_activations
            sizes[kind] = sizes.get(kind, 0) + count_bytes(held.create(weight, dtype, device_type))
    kept = [
        f"{name} weights stay as they are: {format_bytes(size)}" for (is_kept, name), size in sizes.items() if is_kept
    ]
    dense = [
        f"{name} weights become {dtype_name(dtype)} as they are read: {format_bytes(size)}"
        for (is_kept, name), size in sizes.items()
        if not is_kept
    ]
    if not sizes:
        return None
    activations = "rounded to E4M3 by token, where the checkpoint was made for that" if rounds else "not rounded"
    return f"{'; '.join([*kept, *dense])} on a rank; activations are {activations}"
