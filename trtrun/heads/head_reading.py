"""Reads a directory with a head of decoder layers, and holds every tensor to the plan of it.

It does without torch. It knows no kind of heads (eagle_layouts.py, eagle3_layouts.py, dflash_layouts.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trtrun.errors import CheckpointError, shorten
from trtrun.heads.eagle_tensors import NAMES, HeadTensors
from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.heads.heads import HeadsPlan
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import SINGLE_FILE, Checkpoint, read_json


class LayersPlan(HeadsPlan, Protocol):
    """Heads of decoder layers."""

    @property
    def embedding_and_head(self) -> EmbeddingAndHeadPlan:
        """Their embedding and head."""
        ...


Plan = TypeVar("Plan", bound=LayersPlan)


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
    used = (
        {part.name for weight in plan.weights for part in weight.parts}
        | {plan.embedding_and_head.d2t, plan.embedding_and_head.t2d}
        | head.left_out
    )
    if unused := sorted(set(head.names.values()) - used):
        raise CheckpointError(
            f"{files.file(unused[0])}: tensor {shorten(unused[0])} goes with others that are not there: the files are "
            f"incomplete, or the head computes otherwise than {NAMES[method]}"
        )
    return plan
