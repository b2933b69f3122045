"""JSON schemas as the grammar engine is given them: closed against texts that it allows, and they do not.

- 29 February of years that have none, in the formats date and date-time (RFC 3339).
- A property's name spelled with \\u escapes: to the engine that is another name, so that anything may be behind it.
  Not in schemas with patternProperties.

Between their parts texts have no more blanks than an indented JSON has: a model that likes to write them would never
come to an end. A schema may say otherwise in its `x-guidance`.

Formats that JSON Schema does not know are notes to it (2020-12, Validation, 7.2.3), and errors to the engine: they are
left out. Libraries put them beside patterns (zod: cuid, starts_with), or by themselves (pydantic: password, path).

What the engine does not follow is said in other words where these are the same (`schema_rewrites`).

It knows schemas. It does not know grammars.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trtrun.core.guide import MOST_GUIDE_CHARACTERS, OPTIONS_KEY
from trtrun.guiding.schema_rewrites import rewrite_names, rewrite_pattern

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:....-(?:[^0].|0[^2])|....-02-(?:[^2].|2[^9])|{_LEAP_YEAR}-02-29)"
"""What a date begins with, if it is one to the grammar engine."""
_DATES = ("date", "date-time")
_FORMATS = frozenset({
    *_DATES, "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""Those that JSON Schema knows, 2020-12. The engine does not follow all of them, and refuses the others."""
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_VALUES = ("enum", "const", "default", "example", "examples")
_NEEDS_ESCAPES = re.compile(r'\\u00[01]|\x7f|"patternProperties"')
"""Characters without a short escape, in a schema or in a pattern of it; and patterns of names, of which some take the
engine twenty times as much without escapes."""
_ESCAPES = 'nrbtf\\"'
_BLANKS = r"[\x20\t]{0,2}(\r?\n[\x20\t]{0,32})?"
"""Between two parts of a text: two at most, then perhaps a line break and what indents the next line."""


def closed(text: str) -> str:
    """A schema, as JSON, that has the texts of `text` without those that are not valid. One that is nested as deep as
    Python reads stays as it is; the grammar engine refuses it."""
    try:
        schema = json.loads(text)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            return text
        close(schema)
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        return text


def close(schema: dict[str, Any]) -> None:
    """Change a schema into one that has its texts without those that are not valid.

    Raises:
        RecursionError: it is nested too deeply.
    """
    _close_parts(schema)
    needs_escapes = _NEEDS_ESCAPES.search(json.dumps(schema, ensure_ascii=False)) is not None
    options = schema.setdefault(OPTIONS_KEY, {})
    if not isinstance(options, dict):
        return
    if options.get("whitespace_flexible") is not False:
        options.setdefault("whitespace_pattern", _BLANKS)
    if not needs_escapes:
        options.setdefault("json_allowed_escapes", _ESCAPES)


def _close_parts(schema: Any) -> None:
    left, room = [(schema, False)], MOST_GUIDE_CHARACTERS
    while left:
        part, is_map = left.pop()
        if isinstance(part, list):
            left += [(inner, False) for inner in part]
        elif isinstance(part, dict) and is_map:
            left += [(inner, False) for inner in part.values()]
        elif isinstance(part, dict):
            rewrite_pattern(part)
            room -= rewrite_names(part, schema, room)
            left += [(inner, key in _MAPS) for key, inner in part.items() if key not in _VALUES]
            form = part.get("format")
            if isinstance(form, str) and form not in _FORMATS:
                del part["format"]
            elif form in _DATES and isinstance(part.setdefault("allOf", []), list):
                part["allOf"].append({"pattern": _DAY})
