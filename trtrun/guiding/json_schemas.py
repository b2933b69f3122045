r"""JSON schemas as the grammar engine is given them: closed against texts that it would allow and they do not, and
rewritten where it does not follow them: exactly, or not at all.

- 29 February of years that have none, in the formats date and date-time (RFC 3339).
- A property's name spelled with \u escapes: to the engine that is another name, so that anything may be behind it.
  Not in schemas with patternProperties.

Between their parts texts have no more blanks than an indented JSON has: a model that likes to write them would never
come to an end. A schema may say otherwise in its `x-guidance`.

Formats that JSON Schema does not know are notes to it (2020-12, Validation, 7.2.3), and errors to the engine: they are
left out. Libraries put them beside patterns (zod: cuid, starts_with), or by themselves (pydantic: password, path).

What the engine does not follow is rewritten where the meaning stays the same:

- A pattern that begins with look-aheads is several patterns, all of which a text has: `^(?=A)B` is `^A` and `^B`. That
  a text is not all of some characters, `^(?![-.]*$)B`, is that it has another one. So pydantic writes decimals, and
  others passwords.
- `\Z` is what Python has for `\z`, the end of a text.
- `propertyNames` with a list of names are properties, and with a pattern or lengths `patternProperties`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from trtrun.core.guide import MOST_GUIDE_CHARACTERS, OPTIONS_KEY

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CLASS = r"\[\^?(?:\\.|[^\]\\])+\]|\\[dDwWsS]"
_ALL_OF_CLASS = re.compile(rf"\^?({_CLASS})([*+])(?:\$|\\z)")
_NULLABLE = re.compile(rf"(?:{_CLASS}|\\.|\w)(?:\{{0,\d*\}}|\*|\?)")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|:|P?<\w+>)|.", re.DOTALL)
_MOST_REFERENCES = 16
_OF_NAMES = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "title", "description"})


def patterns_of(pattern: str) -> list[str] | None:
    """Patterns without look-around, all of which a text has that has `pattern`, and no other text; None where there are
    none that are known to be."""
    tokens = [r"\z" if token == r"\Z" else token for token in _TOKEN.findall(pattern)]
    if not _LOOK_AROUND.search("".join(tokens)):
        return ["".join(tokens)]
    if tokens[0] not in ("^", r"\A"):
        return None
    found, place = [], 1
    while place < len(tokens) and tokens[place] in ("(?=", "(?!"):
        end = _end_of_group(tokens, place)
        if end is None:
            return None
        inner = _ahead("".join(tokens[place + 1 : end]), is_wanted=tokens[place] == "(?=")
        if inner is None:
            return None
        found.append(inner)
        place = end + 1
    rest = "".join(_without_free_end(tokens[place:]))
    found.insert(0, f"^{rest}")
    return None if _has_choice(tokens[place:]) or any(map(_LOOK_AROUND.search, found)) else found


def _ahead(inner: str, *, is_wanted: bool) -> str | None:
    """What a text has, or has not, from its beginning on, as a pattern; None where that is not known."""
    if is_wanted:
        inner = inner if inner.startswith("^") and len(alternatives_of(inner)) == 1 else f"^(?:{inner})"
        return inner
    if inner in ("$", "^$", r"\z"):
        return r"[\s\S]"
    found = _ALL_OF_CLASS.fullmatch(inner)
    if found is None:
        return None
    characters, often = found.groups()
    other = _other_class(characters)
    return other if often == "*" else f"^$|{other}"


def _other_class(characters: str) -> str:
    """The characters that a class does not have."""
    if not characters.startswith("["):
        return f"[^{characters}]"
    return f"[{characters[2:]}" if characters.startswith("[^") else f"[^{characters[1:]}"


def _end_of_group(tokens: list[str], begin: int) -> int | None:
    depth = 0
    for place in range(begin, len(tokens)):
        depth += tokens[place].startswith("(") - (tokens[place] == ")")
        if depth == 0:
            return place
    return None


def _has_choice(tokens: list[str]) -> bool:
    """Whether there are alternatives outside of groups."""
    return len(alternatives_of("".join(tokens))) > 1


def alternatives_of(pattern: str) -> list[str]:
    """The alternatives that stand outside of a pattern's groups, each of which has its own anchors."""
    found, depth = [""], 0
    for token in _TOKEN.findall(pattern):
        depth += token.startswith("(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


def _without_free_end(tokens: list[str]) -> list[str]:
    """A pattern without a group at its end that may be nothing: whatever follows, a text has it."""
    begin = next((place for place, token in enumerate(tokens) if token in ("(", "(?:")), len(tokens))
    if _end_of_group(tokens, begin) != len(tokens) - 1:
        return tokens
    first = "".join(tokens[begin + 1 : -1]).partition("|")[0]
    return tokens[:begin] if _NULLABLE.fullmatch(first) else tokens


def rewrite_pattern(part: dict[str, Any]) -> None:
    """Change a schema's pattern into such as the engine follows, where they are known."""
    pattern = part.get("pattern")
    found = patterns_of(pattern) if isinstance(pattern, str) and pattern else None
    if found is None or not isinstance(part.get("allOf", []), list):
        return
    part["pattern"], *others = found
    if others:
        part["allOf"] = [*part.get("allOf", []), *({"pattern": other} for other in others)]


def rewrite_names(part: dict[str, Any], root: Mapping[str, Any], room: int) -> int:
    """Change a schema's `propertyNames` into properties, where that is known to be the same.

    Args:
        part: of `root`, which its references are of.
        root: the whole schema.
        room: characters that it may grow by: each name that is listed has a schema of its own then.

    Returns:
        By how many it grew, about.
    """
    names = _resolved(part.get("propertyNames"), root)
    names = {} if names is True else names
    if not isinstance(names, dict) or not _is_known(names):
        return 0
    properties, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return 0
    others, allowed, pattern = part.get("additionalProperties", {}), _names_of(names), _pattern_of(names)
    kept = {name: schema for name, schema in properties.items() if _may_be(name, names, allowed)}
    new = [name for name in allowed or () if name not in kept and _may_be(name, names, allowed)]
    new = new if others is not False else []
    size = len(json.dumps(others)) * len(new)
    # A pattern is of all names, and not of the others alone; which of them have it is not looked at here.
    is_of_all = pattern != "" and (kept or required) and ("pattern" in names or others not in ({}, True))
    is_parted = (pattern != "" or allowed is not None) and part.get("patternProperties")
    has_all = all(isinstance(name, str) and _may_be(name, names, allowed) for name in required)
    if pattern is None or size > room or is_of_all or is_parted or not has_all:
        return 0
    del part["propertyNames"]
    if kept or new or properties:
        part["properties"] = kept | {name: deepcopy(others) for name in new}
    if allowed is not None or pattern != "":
        part["additionalProperties"] = False
    if pattern != "" and others is not False:
        part["patternProperties"] = {pattern: others}
    return size


def _is_known(names: Mapping[str, Any]) -> bool:
    """Whether all that a schema of names says is read here."""
    lengths = (names.get("minLength", 0), names.get("maxLength", 0))
    is_listed = "const" in names or "enum" in names
    return (
        names.keys() <= _OF_NAMES
        and names.get("type", "string") == "string"
        and isinstance(names.get("pattern", ""), str)
        and isinstance(names.get("enum", []), list)
        and not (is_listed and "pattern" in names)
        and all(type(one) is int and one >= 0 for one in lengths)
    )


def _names_of(names: Mapping[str, Any]) -> list[str] | None:
    """The names that there may be; None where they are not listed."""
    if "const" not in names and "enum" not in names:
        return None
    listed = names["enum"] if "enum" in names else [names["const"]]
    return [name for name in listed if isinstance(name, str) and name == names.get("const", name)]


def _may_be(name: str, names: Mapping[str, Any], allowed: list[str] | None) -> bool:
    """Whether a name is among those that there may be, as far as lists and lengths say."""
    least, most = names.get("minLength", 0), names.get("maxLength", len(name))
    return (allowed is None or name in allowed) and least <= len(name) <= most


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """The pattern of names, empty if they are listed, or may be any; None if it would take several."""
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if "const" in names or "enum" in names:
        return ""
    if "pattern" not in names:
        return "" if (least, most) == (0, "") else rf"^[\s\S]{{{least},{most}}}$"
    found = patterns_of(names["pattern"]) if (least, most) == (0, "") and names["pattern"] else None
    return found[0] if found is not None and len(found) == 1 else None


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or what its reference names in the schema that it is of; None where it names nothing."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if len(schema) > 1 or not reference.startswith("#"):
            return None
        schema = root
        for key in _keys_of(reference):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def _keys_of(reference: str) -> Iterator[str]:
    for key in filter(None, reference.removeprefix("#").split("/")):
        yield key.replace("~1", "/").replace("~0", "~")


_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:....-(?:[^0].|0[^2])|....-02-(?:[^2].|2[^9])|{_LEAP_YEAR}-02-29)"
"""What a date begins with, if it is one to the grammar engine."""
_DATES = ("date", "date-time")
_FORMATS = frozenset({
    *_DATES, "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""Formats that JSON Schema knows, 2020-12. The engine does not follow all of them, and refuses the others."""
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
