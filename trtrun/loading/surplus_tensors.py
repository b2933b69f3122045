"""What a checkpoint's files have beyond what its config.json calls for: a vocabulary head where the embedding is said
to be it, which transformers would take; and tensors of layers that no weight has. It does not know who uses weights.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from trtrun.errors import CheckpointError
from trtrun.linear.quantization import Quantization
from trtrun.linear.quantization.base import FLOATS
from trtrun.loading.weight_check import stored_tensors
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import TORCH_NAMES, Checkpoint
from trtrun.weights.weight import Share

_logger = logging.getLogger(__name__)

_HEAD, _ROWS = "lm_head.weight", 64

_LAYER = re.compile(r".*?\blayers\.\d+\.")

_NOT_NEEDED = re.compile(
    r".*\.experts\..*|.*\.(inv_freq|g_idx|weight_g_idx|weight_shape)"
    r"|.*[._](k|v|q|kv|input|output|prob)_(scale|zero_point|global_scale)"
)
"""Tensors that no text depends on: angles, orders of groups, and scales of activations. And experts', which are many,
and read in parts that have other names."""


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


def tell_of_unread(path: Path, files: Checkpoint, config: ModelConfig, default: Quantization) -> None:
    """Say which tensors of a directory are in no weight, in a line of the log; nothing where there are none."""
    unread = _find_unread(files, config, default)
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        _logger.warning(
            "%s has %s, which config.json does not call for: not read, so that texts may not be the model's",
            path,
            unread[0] + more,
        )


def _find_unread(files: Checkpoint, config: ModelConfig, default: Quantization) -> list[str]:
    """Tensors in a model's own layers that none of its weights has: files of another model than config.json tells of
    have some, such as a norm or a bias, without which texts are others. Biases that are zero change nothing: AutoGPTQ
    writes them.

    Args:
        files: with their headers read.
        config, default: see `held_weights`.
    """
    weights = [weight for weight in config.weights if weight.use != "expert"]
    held = ((weight.cut(Share(0, 1)), config.quantization_of(weight, default)) for weight in weights)
    read = {part.name for weight, how in held for part in stored_tensors(weight, how)}
    layers = {found[0] for name in read if (found := _LAYER.match(name))}
    left = (name for name in files.names() if name not in read and not _NOT_NEEDED.fullmatch(name))
    of_layers = (name for name in left if (found := _LAYER.match(name)) and found[0] in layers)
    return [name for name in of_layers if not (name.endswith("bias") and _is_zero(files, name))]


def _is_zero(files: Checkpoint, name: str) -> bool:
    ranges = tuple(map(range, files.shape(name)))
    return all(not piece.count_nonzero() for _, piece in files.pieces(name, ranges))
