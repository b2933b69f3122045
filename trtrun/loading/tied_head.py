"""Whether a checkpoint whose vocabulary head is said to be its embedding has another one in its files all the same.

transformers takes the one in the files then. It reads some rows; it does not know who uses the head.
"""

from __future__ import annotations

import torch

from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import FLOATS
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import TORCH_NAMES, Checkpoint

_HEAD, _ROWS = "lm_head.weight", 64


def check_tied_head(files: Checkpoint, config: ModelConfig) -> None:
    """Check that tied files have no head, or the embedding as head: their first rows are compared.

    Args:
        files: in which the embedding is as config.json calls for it.
        config: what config.json says.

    Raises:
        CheckpointError: they have another one.
    """
    (embedding,) = config.embedding.parts
    if not config.tie_word_embeddings or _HEAD not in files:
        return
    if TORCH_NAMES.get(files.dtype_code(_HEAD)) not in FLOATS:
        return
    rows = _first_rows(files, embedding.name)
    if files.shape(_HEAD)[1:] != files.shape(embedding.name)[1:] or not torch.equal(rows, _first_rows(files, _HEAD)):
        raise CheckpointError(
            f"{files.file(_HEAD)}: '{_HEAD}' is not the embedding, and config.json says that it is "
            "(tie_word_embeddings, which some families have unless it is said): set it to false there, or take the "
            "tensor out"
        )


def _first_rows(files: Checkpoint, name: str) -> torch.Tensor:
    """In float32."""
    count, *columns = files.shape(name)
    ranges = (range(min(count, _ROWS)), *map(range, columns))
    return torch.cat([piece.float() for _, piece in files.pieces(name, ranges)])
