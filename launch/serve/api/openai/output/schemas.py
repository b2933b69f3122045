"""JSON schemas as parts of a grammar: of a tool's arguments, and of what an answer must be otherwise.

It knows schemas and llguidance's options of them, and no form of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtrun.chats.tools import Tool
from trtrun.core.guide import OPTIONS_KEY
from trtrun.guiding.json_schemas import close
from trtrun.guiding.schema_rewrites import patterns_of

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = ("title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly")
_VALUES = ("enum", "const")
ANY: Mapping[str, Any] = {"type": "object"}


def arguments_schema(tool: Tool) -> Any:
    """The schema of a tool's arguments. Of a tool that is not strict, keywords that cannot be followed are left out: it
    was not promised that its arguments are valid, and whoever offers it may not have written it."""
    schema = without_notes(tool.parameters, has_look_around=tool.is_strict)
    options = schema.get(OPTIONS_KEY, {}) if isinstance(schema, dict) else None
    if not tool.is_strict and isinstance(options, dict):
        return {**schema, OPTIONS_KEY: {"lenient": True, **options}}
    return schema


def as_part(schema: Any) -> str:
    """A schema as a part of a rule. It may be changed."""
    if isinstance(schema, dict) and schema is not ANY:
        close(schema)
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def without_notes(schema: Any, *, has_look_around: bool = True) -> Any:
    """A schema without what says nothing of values: it may be long, and hold names of special tokens.

    Args:
        schema: JSON values.
        has_look_around: patterns with look-around that no grammar follows stay in it.
    """
    if isinstance(schema, list):
        return [without_notes(item, has_look_around=has_look_around) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    told: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            told[key] = {name: without_notes(inner, has_look_around=has_look_around) for name, inner in value.items()}
        elif key == "pattern" and not has_look_around and isinstance(value, str) and patterns_of(value) is None:
            continue
        elif key not in _NOTES:
            told[key] = value if key in _VALUES else without_notes(value, has_look_around=has_look_around)
    return told


def moved(schema: Any, root: str) -> Any:
    """A copy of a schema that stands at `root` of another one: its references are of its own parts still."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    told: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            told[key] = {name: moved(inner, root) for name, inner in value.items()}
        elif key != "$id":  # against which references would be read
            told[key] = value if key in _VALUES else moved(value, root)
    for key in ("$ref", "$dynamicRef"):
        if isinstance(told.get(key), str) and told[key].startswith("#"):
            told[key] = root + told[key].removeprefix("#")
    return told
