"""YAML as people write it: files, read strictly, with one-line errors, and changed by `a.b=value` options.

What comes out is what JSON could hold: mappings with words as keys, lists, texts, numbers, true, false and nothing.
It knows YAML and mappings. It does not know which keys mean something (config.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trtrun.errors import ConfigError, shorten, shorten_path, wrap_errors

COMMAND_LINE = Path("the command line")
"""Stands in the place of a file's path where there is none: all values come as overrides."""

MOST_BYTES = 1024 * 1024
"""Of a configuration file: something else was named by mistake."""

MOST_VALUES = 20_000
"""Values of one file with every alias written out: a few aliases of aliases would fill any memory."""

MOST_DEPTH = 50
"""How deep sections and lists may be nested; the deepest that means something is five."""

_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
    "seq": "a list",
    "map": "a mapping",
}
"""YAML's own kinds that a configuration may hold. Dates, sets and bytes mean nothing in it."""


def read_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and apply overrides, without checking what the values mean. Of COMMAND_LINE nothing is read.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or no mapping; or what was given is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a configuration must be a RuntimeConfig or a YAML file's path, not {describe_kind(path)}")
    file = Path(path)
    values = {} if file == COMMAND_LINE else _read_file(file)
    for change in overrides:
        apply_override(values, change)
    return values


def _read_file(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds."""
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: bytes that are no UTF-8, or a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration file {shorten_path(file)}: {reason}") from None
    if len(text) > MOST_BYTES:
        raise ConfigError(f"cannot read the configuration file {file}: it is larger than {MOST_BYTES >> 20} MiB")
    values = parse_yaml(text, str(file))
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: the file must be a mapping with at least 'target', not {describe_kind(values)}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML; a key that stands twice is refused, because one of the two would be lost.

    Raises:
        ConfigError: one line with the place of the error.
    """
    with wrap_errors(where, ConfigError):
        try:
            return yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"{where}:{place} is not valid YAML: {problem}") from None


def apply_override(values: dict[Any, Any], override: str) -> None:
    """Set one `a.b=value` in the mapping, making sections on the way."""
    name, equals, text = override.partition("=")
    option = f"--set {override if len(override) < 200 else override[:199] + '…'}"
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{option}: write it as key=value, such as --set speculation.draft_len=8")
    value = parse_yaml(text, option)
    section = values
    for depth, key in enumerate(keys[:-1]):
        inner = section.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"{option}: '{'.'.join(keys[: depth + 1])}' is a value, not a section")
        # A copy: with a YAML anchor two keys may hold the same mapping.
        section[key] = section = dict(inner or {})
    section[keys[-1]] = value


def describe_kind(value: object) -> str:
    """What to call a value of the wrong kind."""
    if value is None:
        return "nothing"
    return {"str": "a text", "int": "a number", "float": "a number", "list": "a list", "dict": "a mapping"}.get(
        type(value).__name__, type(value).__name__
    )


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader for configurations: bounded in size and depth, each key once, and no kinds that JSON lacks."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}  # of the finished nodes, by their id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count what is composed, with aliases written out, before anything is made of it."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias stands inside of what it names", mark)
            self._count(self._sizes[id(node)], mark)
            return node
        before, self._depth = self._values, self._depth + 1
        if self._depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_DEPTH} levels are nested here", mark)
        self._count(1, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What a node stands for; an int that is none (`!!int x`, a number of 5,000 digits) is told with its place."""
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:
            kind = _KINDS.get(node.tag.rpartition(":")[2], node.tag)
            problem = f"{shorten(node.value)} cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; keys are words that stand once."""
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"a key must be a word, not {shorten(key)}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key == "<<":
                problem = "keys are not merged (<<) here: write them out"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                problem = f"the key {shorten(key)} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def _refuse_kind(self, node: yaml.Node) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        problem = f"a value of the kind {shorten(tag)} means nothing here"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def _count(self, number: int, mark: Any) -> None:
        self._values += number
        if self._values > MOST_VALUES:
            problem = f"these are more than {MOST_VALUES} values, with every alias written out"
            raise yaml.composer.ComposerError(None, None, problem, mark)


_TAG = "tag:yaml.org,2002:"
_StrictLoader.yaml_constructors = {
    **{_TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + kind] for kind in _KINDS},
    None: _StrictLoader._refuse_kind,
}
# YAML 1.1 reads 1:30:00 as 5400, a number in base 60, and 2024-01-01 as a date. Here they are texts, as in YAML 1.2:
# Slurm's times and people's folders look like that.
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_StrictLoader.yaml_implicit_resolvers = {
    first: [
        (_TAG + "str", _BASE_60),
        *((tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in _KINDS),
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
