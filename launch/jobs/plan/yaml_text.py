"""A configuration as the text of a YAML file, with a comment above the keys that have a reason.

It knows mappings. It does not know which keys mean something, but for those that hold paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

_WIDTH = 100
_PATHS = (
    ("target", "model"), ("draft", "model"), ("tokenizer",), ("adapters",), ("draft_adapters",),
    ("speculation", "suffix_corpus"),
)  # fmt: skip
"""Keys that hold a path, or several by names."""


def render_yaml(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """The text of a YAML file that holds `values`.

    Args:
        values: what JSON could hold.
        comments: texts by key, such as `target.devices`.
    """
    told = comments or {}
    lines: list[str] = []
    for name, value in values.items():
        lines += comment_lines(told.get(name, ""))
        if not isinstance(value, Mapping) or not value:
            lines.append(f"{flow(name)}: {flow(value)}")
            continue
        lines.append(f"{flow(name)}:")
        for key, inner in value.items():
            lines += comment_lines(told.get(f"{name}.{key}", ""), "  ")
            lines.append(f"  {flow(key)}: {flow(inner)}")
    return "\n".join(lines) + "\n"


def with_absolute_models(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The values with paths that do not depend on the folder of the file; names of models stay.

    Args:
        values: as a YAML file holds them.
        base: the folder that relative paths start from; the working directory comes behind it.
    """
    settled = dict(values)
    for section, *keys in _PATHS:
        if section not in settled:
            continue
        found = settled[section]
        if keys and isinstance(found, Mapping) and keys[0] in found:
            settled[section] = {**found, keys[0]: _absolute(found[keys[0]], base)}
        elif not keys:
            settled[section] = _absolute(found, base)
    return settled


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(inner, base) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    try:
        path = Path(value).expanduser()
        places = (place / path for place in (base, Path.cwd()))
        return next((str(place.resolve()) for place in places if place.exists()), value)
    except (OSError, RuntimeError):  # which the configuration has refused
        return value


def comment_lines(text: str, indent: str = "") -> Iterator[str]:
    """A text as comments."""
    for line in wrap(text, _WIDTH - len(indent), break_on_hyphens=False, break_long_words=False):
        yield f"{indent}# {line}"


def flow(value: object) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=sys.maxsize, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
