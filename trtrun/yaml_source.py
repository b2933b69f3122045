"""YAML as people write it: read strictly, with one-line errors, and changed by `a.b=value` options.

It knows YAML and mappings. It does not know which keys mean something (config.py).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from trtrun.errors import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML; a key that stands twice is refused, because one of the two would be lost.

    Raises:
        ConfigError: one line with the place of the error.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}:{place} is not valid YAML: {problem}") from None


def apply_override(values: dict[Any, Any], override: str) -> None:
    """Set one `a.b=value` in the mapping, making sections on the way."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as key=value, such as --set speculation.draft_len=8")
    value = parse_yaml(text, f"--set {override}")
    section = values
    for depth, key in enumerate(keys[:-1]):
        inner = section.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: '{'.'.join(keys[: depth + 1])}' is a value, not a section")
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


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"a key must be a word, not {key!r}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1:30:00 as 5400, a number in base 60. Here it is a text, as in YAML 1.2: Slurm's times look like that.
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", _BASE_60), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
