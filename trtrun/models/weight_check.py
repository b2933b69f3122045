"""Whether a checkpoint has the weights that its config.json calls for, told from the headers of its files.

The loader asks it before it reads the first byte, and so does everything that wants to know beforehand whether loading
will work (`trtrun plan`, `check`, the start of `run`): they cannot differ. It reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtrun.configuration.config import LoadFormat
from trtrun.linear.quantization import QUANTIZATIONS, Quantization, of_head
from trtrun.linear.quantization.base import TensorSlice
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.config import ModelConfig
from trtrun.models.shard_layout import ShardLayout, Weight

if TYPE_CHECKING:
    import torch


class WeightFiles(Protocol):
    """What is used of a `Checkpoint`, or of what stands for one."""

    path: Path
    bytes_read: int

    def check(self, name: str, shape: tuple[int, ...]) -> int:
        """See Checkpoint."""
        ...

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """See Checkpoint; pieces may be on the device that they are for."""
        ...

    def close(self) -> None:
        """See Checkpoint."""
        ...


def check_weights(checkpoint: WeightFiles, layout: ShardLayout, quantization: Quantization) -> int:
    """Check every tensor that a rank reads: that it is there, in its shape and in a dtype that is supported.

    Args:
        checkpoint: with its headers read.
        layout: of the rank.
        quantization: of the linear layers, which says which tensors they have.

    Returns:
        Bytes of the rank's slices, in the files' dtypes.

    Raises:
        CheckpointError: a tensor is missing, or another one than config.json calls for.
    """
    stored: list[TensorSlice] = [part for weight in plain_weights(layout) for part in weight.parts]
    for weight, held in quantized_weights(layout, quantization):
        stored += held.stored(weight)
    return sum(
        math.prod(len(item) for item in part.ranges) * checkpoint.check(part.name, part.shape) for part in stored
    )


def check_model_weights(
    path: Path, config: ModelConfig, tp_size: int, quantization: str = "none", load_format: LoadFormat = "auto"
) -> None:
    """Open the files of a model and check its weights, unless they will be made up. All ranks of a group read slices of
    the same tensors, so that what holds for one of them holds for all.

    Raises:
        NoWeightsError: the directory has no weights.
        CheckpointError: they are truncated, of another format, or not those that `config` calls for.
    """
    if load_format == "dummy":
        return
    held = QUANTIZATIONS.get(quantization)
    check_weights(Checkpoint(path), ShardLayout(config, 0, tp_size), held)


def check_split(config: ModelConfig, tp_size: int, dtype: str, device_type: str, quantization: str = "none") -> None:
    """Check that a model can be shared out over the ranks of a group, and held on their devices as is asked for.

    Args:
        config: of the model.
        tp_size: ranks of the group.
        dtype: of activations, by name.
        device_type: of all of its devices.
        quantization: how the weights of linear layers are held, by name.

    Raises:
        CheckpointError: heads or features cannot be shared out over `tp_size` ranks.
        ConfigError: the quantization is unknown, or does not go with the dtype on the device.
    """
    QUANTIZATIONS.get(quantization).check(dtype, device_type)
    for rank in range(tp_size):
        ShardLayout(config, rank, tp_size)


def plain_weights(layout: ShardLayout) -> list[Weight]:
    """Every weight of the rank that is no linear layer's: the embedding, norms and biases."""
    return [layout.embedding(), *(weight for weight in layout.all_weights() if len(weight.shape) == 1)]


def quantized_weights(layout: ShardLayout, quantization: Quantization) -> list[tuple[Weight, Quantization]]:
    """Every linear layer's weight of the rank, and how it is held."""
    layers = [(weight, quantization) for weight in layout.layer_matrices()]
    return [(layout.head(), of_head(quantization)), *layers]
