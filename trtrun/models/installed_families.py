"""Families by architecture: the product's own, and those of other packages that are installed.

A package names the module that registers its family under the architecture of config.json, in its pyproject.toml:

    [project.entry-points."trtrun_families"]
    NewForCausalLM = "package.module"

The module is imported when a checkpoint asks for it. It knows no config.json.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from trtrun.errors import CheckpointError, TrtrunError, one_line
from trtrun.registry import MODEL_FAMILIES

GROUP = "trtrun_families"
"""The group of entry points."""

_PAGE = "docs/adding-a-model.md says how to add one"


def find_family(architecture: str) -> Any:
    """The `ModelFamily` of an architecture.

    Raises:
        CheckpointError: no package has it, or the one that does cannot be imported or does not register it.
    """
    if architecture not in MODEL_FAMILIES:
        for entry in entry_points(group=GROUP, name=architecture):
            _load(architecture, entry.value, entry.load)
    try:
        return MODEL_FAMILIES.get(architecture)
    except TrtrunError as error:
        raise CheckpointError(f"{error}; {_PAGE}") from None


def _load(architecture: str, module: str, load: Any) -> None:
    try:
        load()
    except Exception as error:  # whatever another package does wrong
        line = f"the family of {architecture} cannot be loaded from {module}: {type(error).__name__}: {one_line(error)}"
        raise CheckpointError(line) from error
    if architecture not in MODEL_FAMILIES:
        raise CheckpointError(f"{module}, which the family of {architecture} is said to be in, does not register it")
