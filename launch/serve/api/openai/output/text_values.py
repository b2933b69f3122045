"""Values of arguments that are written as text: which types the schema of a tool lets them have, and what they are as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}
"""Words of JSON, and as chat templates write Python's."""

_MOST_STEPS = 16
"""References that are followed, one behind the other."""


def schema_of(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter; None where a tool's schema does not say it."""
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or what its reference names in the schema that it is of; None where it names nothing."""
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for key in reference.removeprefix("#").strip("/").split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if key and isinstance(schema, Mapping) else schema
    return None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Names of the JSON types that values may have; all where a schema does not say."""
    return _types_of(schema, root, 0, {})


def _types_of(schema: Any, root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """`known`: of schemas that were looked at, or are, each once: alternatives may name each other, and themselves."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MOST_STEPS:
        return ALL_TYPES
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = found = ALL_TYPES
    told = schema.get("type")
    if isinstance(told, str | list):
        found = frozenset([told] if isinstance(told, str) else map(str, told))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        found &= frozenset(_TYPE_NAMES[type(value)] for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(_types_of(item, root, depth + 1, known) for item in schema[key]))
    known[id(schema)] = found
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as text: itself where it is JSON of a type that the value may have, and a
    text where it may be one, or is no JSON."""
    word = _WORDS.get(text.strip().lower())
    if word is not None and word[0] in types:
        return word[1]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    name = _TYPE_NAMES[type(value)]
    has_type = name in types or (name == "integer" and "number" in types)
    if "string" in types and (name == "string" or not has_type):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
