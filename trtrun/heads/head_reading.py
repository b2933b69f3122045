"""The one reader of directories with a head of decoder layers, which holds every tensor to the plan of the head.

eagle_layouts.py and dflash_layouts.py say what differs between EAGLE, EAGLE-3, DFlash and DSpark. `tell_heads` finds
which method a directory is for, from names and shapes of tensors: for messages, where it stands beside another method.

Files say in two ways, or not at all, at which boundaries of the target a head reads hidden states:

    boundary  speculators, vLLM, NVIDIA   id j is what enters layer j; 0 the embedding, N what leaves the last layer
    output    SpecForge, TensorRT-LLM     id j is what leaves layer j: boundary j + 1

Files that say nothing mean what enters layers 2, N // 2 and N - 3, as the reference has it (Li et al. 2025,
arXiv:2503.01840). These very layers tell the two ways apart, wherever they stand. A head that reads a boundary beside
its own drafts badly, and no file shows it: an option overrides what is found. None of this needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trtrun.errors import CheckpointError, shorten
from trtrun.heads.assistants.assistant_layouts import is_assistant
from trtrun.heads.eagle_tensors import NAMES, HeadTensors, find_method, sort_names
from trtrun.heads.head_plan import DecoderHeadPlan
from trtrun.heads.heads import MEDUSA_FILE
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import SINGLE_FILE, Checkpoint, read_json

Plan = TypeVar("Plan", bound=DecoderHeadPlan)


def read_head(
    path: Path,
    target: ModelConfig,
    method: str,
    beside_layers: re.Pattern[str],
    plan_of: Callable[[HeadTensors], Plan],
    refuse: Callable[[Sequence[str], Mapping[str, Any]], None] = lambda names, values: None,
) -> Plan:
    """The head of a directory, of the kind that `method` drafts with, as `plan_of` plans it; see HeadTensors. What is
    no such head though its tensors look alike `refuse` says, of names in the files and of config.json.

    Raises:
        CheckpointError: there is none, it is incomplete, of another kind or for another target; one line.
    """
    files, values = Checkpoint(path, (SINGLE_FILE,), "heads"), read_json(path, "config.json", required=True)
    try:
        refuse(list(files.names()), values)
        head = HeadTensors(files, values, target, method, beside_layers)
        plan = plan_of(head)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    for weight in plan.weights:
        for part in weight.parts:
            if part.name in files and files.shape(part.name) != part.shape:
                raise CheckpointError(
                    f"{files.file(part.name)}: tensor '{part.name}' has shape {list(files.shape(part.name))}, not "
                    f"{list(part.shape)}, which its other tensors, its config.json or the target call for"
                )
            files.check(part.name, part.shape)
    own = plan.embedding_and_head
    used = {part.name for weight in plan.weights for part in weight.parts} | {own.d2t, own.t2d} | head.left_out
    if unused := sorted(set(head.names.values()) - used):
        raise CheckpointError(
            f"{files.file(unused[0])}: tensor {shorten(unused[0])} goes with others that are not there: the files are "
            f"incomplete, or the head computes otherwise than {NAMES[method]}"
        )
    return plan


def find_heads(path: Path) -> str | None:
    """Name of the method that a directory with heads is for, by its tensors; None where it has none that are known."""
    if (path / MEDUSA_FILE).is_file():
        return "medusa"
    try:
        files = Checkpoint(path, what="heads")
        return "gemma4_mtp" if is_assistant(files.names()) else find_method(files, sort_names(files))
    except CheckpointError:
        return None


def tell_heads(path: Path, method: str | None = None) -> str | None:
    """What to say of a directory with heads of a method that is not `method`, without its name; None where it has no
    such heads, as far as it shows."""
    found = find_heads(path)
    if found is None or found == ("dflash" if method == "dspark" else method):
        return None
    return f"it has heads that draft by method {found}: set speculation.method to that"


_IDS = "eagle_aux_hidden_state_layer_ids"
OPTION = "speculation.eagle3_layers_to_capture"


def list_outputs(boundaries: Sequence[int]) -> str:
    """Boundaries as the option has them, for people."""
    return ", ".join(str(boundary - 1) for boundary in boundaries)


def read_boundaries(
    values: Mapping[str, Any], num_layers: int, count: int, captured: Sequence[int] | None
) -> tuple[int, ...]:
    """The boundaries, in the order in which the head takes them.

    Args:
        values: of the head's config.json.
        num_layers: of the target.
        count: how many the head takes, as its tensors say.
        captured: the option: layers of the target whose output it reads, from 0, and -1 for the embedding; None leaves
            it to the file.

    Raises:
        CheckpointError: they are not the target's, not as many, or one stands there twice.
    """
    if captured is not None:
        source, found = OPTION, tuple(layer + 1 for layer in captured)
    else:
        source, found = _of_file(values, num_layers, count)
    if len(found) != count:
        raise CheckpointError(
            f"{source}: {len(found)} layers are named, but fc.weight takes the hidden states of {count}: name {count}"
        )
    wrong = next((boundary for boundary in found if not 0 <= boundary <= num_layers), None)
    if wrong is not None:
        raise CheckpointError(
            f"{source}: it means the output of layer {wrong - 1} of a target of {num_layers}: set {OPTION} to layers "
            f"from -1, the embedding, to {num_layers - 1}"
        )
    if len(set(found)) < len(found):
        raise CheckpointError(
            f"{source}: it means the outputs of layers {list_outputs(found)}, one of them twice: set {OPTION}"
        )
    return found


def _of_file(values: Mapping[str, Any], num_layers: int, count: int) -> tuple[str, tuple[int, ...]]:
    """Where they are said, and the boundaries."""
    nested = values.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_aux_hidden_state", values.get("use_aux_hidden_state")) is False:
        raise CheckpointError("use_aux_hidden_state is false: heads that read the last layer alone are not supported")
    ids = values.get(_IDS) or nested.get(_IDS) or None  # an empty list is a trainer's way to say nothing
    usual = (2, num_layers // 2, num_layers - 3)
    if ids is None:
        if count != len(usual):
            raise CheckpointError(
                f"fc.weight takes the hidden states of {count} layers, and nothing says of which: set {OPTION}"
            )
        return f"config.json names no layers, so that they are the usual ones of {num_layers}", usual
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise CheckpointError(f"'{_IDS}' must be a list of whole numbers, not {shorten(ids)}")
    given, outputs = tuple(ids), tuple(one + 1 for one in ids)
    if usual in (given, outputs):
        return f"'{_IDS}'", usual
    are_boundaries = "transformer_layer_config" in values or max(given, default=0) >= num_layers
    return f"'{_IDS}'", given if are_boundaries else outputs
