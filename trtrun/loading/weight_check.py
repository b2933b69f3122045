"""Whether a checkpoint has the weights that its config.json calls for, told from the headers of its files.

The loader asks it before it reads the first byte, and so does everything that wants to know beforehand whether loading
will work (`trtrun plan`, `check`, the start of `run`): they cannot differ. It reads no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.engine_sections import LoadFormat, ModelSection
from trtrun.errors import CheckpointError, ConfigError
from trtrun.heads.heads import HeadsPlan
from trtrun.linear.quantization import QUANTIZATIONS, Quantization, find_quantization
from trtrun.linear.quantization.base import TensorSlice
from trtrun.linear.stored.layout import CutError
from trtrun.loading.engine_shards import check_engine_weights
from trtrun.models.config import ModelConfig
from trtrun.models.experts_plan import find_experts
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import HeldWeight, Share, WeightFiles

_EXPERT = re.compile(r"(.*)\.\d+\.(.*?)")
"""Names of experts' matrices: of the layer's, the expert's number, and the matrix's."""


def held_weights(config: ModelConfig, share: Share, default: Quantization) -> list[tuple[HeldWeight, Quantization]]:
    """All of which a rank holds anything, and how; `default` is of the weights that the checkpoint has stored plainly.

    Raises:
        CheckpointError: heads or features cannot be shared out over so many ranks.
    """
    cut = ((weight, weight.cut(share)) for weight in config.weights)
    return [(held, config.quantization_of(weight, default)) for weight, held in cut if held.num_elements]


def check_weights(files: WeightFiles, config: ModelConfig, share: Share, default: Quantization) -> int:
    """Check every tensor that a rank reads: that it is there, in its shape and in a dtype that is supported.

    Args:
        files: with their headers read.
        config, share, default: see `held_weights`.

    Returns:
        Bytes of the rank's slices, in the files' dtypes.

    Raises:
        CheckpointError: a tensor is missing, or another one than config.json calls for.
    """
    return check_held(files, held_weights(config, share, default))


def check_held(files: WeightFiles, weights: Sequence[tuple[HeldWeight, Quantization]]) -> int:
    """`check_weights` of some of a model's weights, and how they are held."""
    read = 0
    for weight, held in weights:
        for part in weight.parts if files.is_dummy else stored_tensors(weight, held):
            if part.is_optional and part.name not in files:
                continue
            item_bytes = files.check(part.name, part.shape, part.dtypes, ones_vary=part.ones_vary)
            read += math.prod(map(len, part.ranges)) * item_bytes
    return read


def stored_tensors(weight: HeldWeight, held: Quantization) -> Sequence[TensorSlice]:
    """What a rank reads of a weight that is held so.

    Raises:
        CheckpointError: it cannot be cut so; experts could lie whole on ranks.
    """
    try:
        return held.stored(weight)
    except CutError as error:
        if weight.use != "expert":
            raise
        raise CheckpointError(f"{error}, or set expert_parallel: true") from None


def check_model_weights(
    path: Path, config: ModelConfig, tp_size: int, quantization: str = "none", load_format: LoadFormat = "auto"
) -> None:
    """Open the files of a model and check its weights, unless dummy ones will be used. All ranks of a group read slices
    of the same tensors, so that what holds for one of them holds for all; experts that lie whole on ranks are checked
    as those of one rank.

    Raises:
        NoWeightsError: the directory has no weights.
        CheckpointError: they are truncated, of another format, or not those that `config` calls for.
    """
    if load_format != "dummy" and not check_engine_weights(path, tp_size, quantization):
        files, default = open_checkpoint(path), QUANTIZATIONS.get(quantization)
        check_weights(files, config, Share(0, tp_size), default)
        if any(plan.by_experts for layer in config.layers for plan in find_experts(layer)):
            check_weights(files, config, Share(0, 1), default)


def check_split(
    config: ModelConfig, share: Share, dtype: str, device_type: str, default: Quantization
) -> list[tuple[HeldWeight, Quantization]]:
    """Check that a model can be shared out, and held on a type of device as is asked for.

    Args:
        config, share, default: see `held_weights`.
        dtype: of activations, by name.
        device_type: "cpu" or "cuda".

    Returns:
        `held_weights`.

    Raises:
        CheckpointError: heads or features cannot be shared out over so many ranks, or not where groups of stored
            weights end.
        ConfigError: a quantization does not go with the dtype on the device.
    """
    return check_forms(held_weights(config, share, default), dtype, device_type)


def check_forms(
    weights: list[tuple[HeldWeight, Quantization]], dtype: str, device_type: str
) -> list[tuple[HeldWeight, Quantization]]:
    """`check_split` of some weights, and how they are held; returns them."""
    for weight, held in weights:
        stored_tensors(weight, held)
        if weight.use == "expert" and device_type != "cpu" and not held.fits_experts:
            raise ConfigError(
                "experts are not held so on these GPUs, whose matrix units do not multiply E4M3 (those of compute "
                "capability 8.9, and from 9.0 on, do): set quantization to none"
            )
    if device_type != "cpu":
        _check_alike(weights)
    for held in dict.fromkeys(held for _, held in weights):
        held.check(dtype, device_type)
    return weights


def _check_alike(weights: Sequence[tuple[HeldWeight, Quantization]]) -> None:
    """Raise CheckpointError where a matrix is not held alike in all experts of a layer, which are multiplied with
    together."""
    known: dict[tuple[str | Any, ...], Quantization] = {}
    for weight, held in weights:
        found = _EXPERT.fullmatch(weight.parts[0].name) if weight.use == "expert" else None
        if found is not None and known.setdefault(found.groups(), held) != held:
            raise CheckpointError(
                f"{weight.parts[0].name} is not stored as other experts of its layer are, which GPUs do not hold: use "
                "CPU slots"
            )


def held_heads(plan: HeadsPlan, share: Share) -> list[tuple[HeldWeight, Quantization]]:
    """All that a rank holds of heads, and how.

    Raises:
        CheckpointError: they cannot be shared out over so many ranks.
    """
    return [(weight.cut(share), plan.held(weight)) for weight in plan.weights]


def check_heads_in_target(plan: HeadsPlan, section: ModelSection, num_ranks: int) -> None:
    """Look at the headers of the target's files for heads that lie there.

    Raises:
        CheckpointError: they are not there, or not of their shapes.
    """
    if plan.files is not None or section.load_format == "dummy":
        return
    try:
        files = open_for_heads(section)
        if not any(part.name in files for weight in plan.weights for part in weight.parts):
            raise CheckpointError(
                f"{section.model} holds no layer that drafts, as config.json calls for: it was left out when the model "
                "was saved; take the model that it was made from, or set speculation.method to another"
            )
        check_held(files, held_heads(plan, Share(0, num_ranks)))
    except CheckpointError as error:
        raise type(error)(f"heads: {error}") from None


def open_for_heads(section: ModelSection) -> Checkpoint:
    """The target's files, for heads that lie there.

    Raises:
        CheckpointError: they cannot be read, or never hold any.
    """
    if read_engine(section.model) is not None:
        raise CheckpointError(
            f"{section.model} is an engine, which holds no layers that draft: name the directory that it was built from"
        )
    return open_checkpoint(section.model)


def choose_default(config: ModelConfig, name: str, *, for_target: bool) -> Quantization:
    """The quantization of what the checkpoint has stored plainly.

    Raises:
        ConfigError: there is none of that name, or a target cannot be held so, or not as the checkpoint has stored it;
            or the checkpoint is quantized and another one is asked for.
    """
    default = find_quantization(name, for_target=for_target)
    if config.quant_method is not None and default is not QUANTIZATIONS.get("none"):
        raise ConfigError(
            f"quantization {name} is for plain weights, and those of this model are quantized already "
            f"({config.quant_method}): leave it out"
        )
    if for_target and not all(config.quantization_of(weight, default).fits_targets for weight in config.weights):
        raise ConfigError("weights that are stored so are for drafts alone, as rows depend on their company")
    return default
