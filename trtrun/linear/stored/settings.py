"""What `quantization_config` says of modules, read and refused in one way: names, lists of names, sizes.

It knows JSON values. It does not know formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import Quantization, StoredQuantizations

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

    def __init__(self, entries: Sequence[str], *, are_globs: bool = False) -> None:
        self._entries, self._are_globs = tuple(entries), are_globs

    def __contains__(self, module: object) -> bool:
        return any(matches(entry, str(module), is_glob=self._are_globs) for entry in self._entries)


def matches(entry: str, module: str, *, is_glob: bool = False) -> bool:
    """Whether an entry of a list means a module; see ModuleNames."""
    if entry.startswith(_EXPRESSION):
        return re.match(entry.removeprefix(_EXPRESSION), module) is not None
    if is_glob and any(sign in entry for sign in "*?["):
        return fnmatchcase(module, entry)
    return entry == _CLASS or f".{entry.strip('.')}." in f".{module}."


def check_expression(expression: str) -> None:
    """Refuse a text that is no regular expression.

    Raises:
        CheckpointError: it is none.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{shorten(expression)} in quantization_config is no expression: {error}") from None


def read_names(values: Mapping[str, Any], *keys: str) -> list[str]:
    """The texts of the first of several keys that is there; none where it is null, too.

    Raises:
        CheckpointError: it is no list of texts, or one of them an expression that is none.
    """
    key = next((key for key in keys if values.get(key) is not None), None)
    names = [] if key is None else values[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"'{key}' of quantization_config must be a list of modules, not {shorten(names)}")
    for name in names:
        if name.startswith(_EXPRESSION):
            check_expression(name.removeprefix(_EXPRESSION))
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
