"""What `quantization_config` says of modules, read and refused in one way: names, lists of names, sizes.

It knows JSON values. It does not know formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import Quantization, StoredQuantizations
from trtrun.module_patterns import Steps, TooManyStepsError, start_matcher

Activations = Literal["none", "token", "group", "static"]
"""What a checkpoint was made to round activations by: not at all; by each token's largest number; by that of each group
of a token's numbers; by a scale that is part of the checkpoint."""

HEAD = "lm_head"
"""The module of the vocabulary head, which most methods leave plain without saying so."""

_EXPRESSION = "re:"
_CLASS = "Linear"
"""The class of all modules that are asked for."""


class ModuleNames:
    """A list of modules, such as those that are not quantized.

    An entry is a class ("Linear"), a module's whole name or whole parts of it ("lm_head", "model.layers.0",
    "mlp.gate"), an expression ("re:.*q_proj$"), or with `are_globs` a pattern of a shell ("model.layers.0.*").
    """

    def __init__(self, entries: Sequence[str], steps: Steps | None = None, *, are_globs: bool = False) -> None:
        """`steps` are those that its expressions share with others of the file."""
        steps = Steps() if steps is None else steps
        self._means = [meaning(entry, steps, is_glob=are_globs) for entry in entries]

    def __contains__(self, module: object) -> bool:
        return any(means(str(module)) for means in self._means)


def meaning(entry: str, steps: Steps, *, is_glob: bool = False) -> Callable[[str], bool]:
    """Tells whether an entry of a list means a module, see ModuleNames; raises a CheckpointError where expressions take
    more than `steps`.

    Raises:
        CheckpointError: it is an expression that cannot be used.
    """
    if entry.startswith(_EXPRESSION):
        expression = entry.removeprefix(_EXPRESSION)
        try:
            matches = start_matcher(expression, steps)
        except ValueError as error:
            raise _refused(expression, error) from None

        @cache
        def means(module: str) -> bool:
            try:
                return matches(module)
            except TooManyStepsError as error:
                raise _refused(expression, error) from None

        return means
    if is_glob and any(sign in entry for sign in "*?["):
        return lambda module: fnmatchcase(module, entry)
    return lambda module: entry == _CLASS or f".{entry.strip('.')}." in f".{module}."


def _refused(expression: str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{shorten(expression)} in quantization_config is no expression that can be used: {error}")


def read_names(values: Mapping[str, Any], *keys: str) -> list[str]:
    """The texts of the first of several keys that is there; none where it is null, too.

    Raises:
        CheckpointError: it is no list of texts.
    """
    key = next((key for key in keys if values.get(key) is not None), None)
    names = [] if key is None else values[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"'{key}' of quantization_config must be a list of modules, not {shorten(names)}")
    return names


def read_section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object under a key; empty where it is null or left out.

    Raises:
        CheckpointError: it is something else.
    """
    section = values.get(key)
    if section is not None and not isinstance(section, dict):
        raise CheckpointError(f"'{key}' of quantization_config must be an object, not {shorten(section)}")
    return section or {}


def read_group_size(values: Mapping[str, Any], default: int | None = None) -> int | None:
    """`group_size`: input features with one scale; None for -1, where all of them have one.

    Raises:
        CheckpointError: it is something else.
    """
    value = default if values.get("group_size") is None else values["group_size"]
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise CheckpointError(
            f"'group_size' of quantization_config must be a positive whole number or -1, not {shorten(value)}"
        )
    return None if value == -1 else value


def refuse(values: Mapping[str, Any], key: str, *supported: object, method: str, default: object = None) -> None:
    """Refuse a value that is none of those that are supported.

    Raises:
        CheckpointError: it is another one.
    """
    value = default if values.get(key) is None else values[key]
    if not any(value is one or (value == one and type(value) is type(one)) for one in supported):
        known = ", ".join("null" if one is None else str(one) for one in supported)
        raise CheckpointError(f"{method} weights with {key} {shorten(value)} are not supported; known: {known}")


def everywhere(held: Quantization, plain: ModuleNames, *, has_head: bool = False) -> StoredQuantizations:
    """One quantization for all matrices but the plain ones; the vocabulary head is one of these unless `has_head`."""

    def find_stored(name: str) -> Quantization | None:
        module = name.removesuffix(".weight")
        return None if module in plain or (module == HEAD and not has_head) else held

    return find_stored
