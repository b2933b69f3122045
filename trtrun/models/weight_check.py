"""Whether a checkpoint has the weights that its config.json calls for, told from the headers of its files.

The loader asks it before it reads the first byte, and so does everything that wants to know beforehand whether loading
will work (`trtrun plan`, `check`, the start of `run`): they cannot differ. It reads no weights.
"""

from __future__ import annotations

from pathlib import Path

from trtrun.models.checkpoint import Checkpoint
from trtrun.models.config import ModelConfig
from trtrun.models.parts import ShardLayout


def check_weights(checkpoint: Checkpoint, layout: ShardLayout) -> int:
    """Check every tensor that a rank reads: that it is there, in its shape and in a dtype that is supported.

    Args:
        checkpoint: with its headers read.
        layout: of the rank.

    Returns:
        Bytes of the rank's slices, in the files' dtypes.

    Raises:
        CheckpointError: a tensor is missing, or another one than config.json calls for.
    """
    return sum(
        part.num_elements * checkpoint.check(part.name, part.shape)
        for weight in layout.all_weights()
        for part in weight.parts
    )


def check_model_weights(path: Path, config: ModelConfig, tp_size: int) -> None:
    """Open the files of a model and check its weights. All ranks of a group read slices of the same tensors, so that
    what holds for one of them holds for all.

    Raises:
        NoWeightsError: the directory has no weights.
        CheckpointError: they are truncated, of another format, or not those that `config` calls for.
    """
    check_weights(Checkpoint(path), ShardLayout(config, 0, tp_size))
