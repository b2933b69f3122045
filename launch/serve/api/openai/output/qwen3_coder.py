"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them: `<function=name>` and each argument as text behind
`<parameter=key>`, between `<tool_call>` and `</tool_call>`; texts become JSON by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from launch.serve.api.openai.output.machine import Arguments, CallBegin, CallMachine, find_mark, may_become
from launch.serve.api.openai.output.object_calls import CLOSE, OPEN

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


FUNCTION, END = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MOST_NAME = 256
_NAME = re.compile(r"([^<>\n]{1,256})>")

_NEXT = f"\n{PARAMETER}"
_NEXT_NAME = re.compile(rf"{_NEXT}([^<>\n]{{1,256}})>\n")
_MAY_BE_NEXT = re.compile(rf"{_NEXT}[^<>\n]{{0,256}}>?")
_CALL_END = re.compile(rf"\n?({END}\s*)?{CLOSE}")
_ENDS_OF_VALUES = (f"\n{END_PARAMETER}", END_PARAMETER, _NEXT, f"\n{END}", END, f"\n{CLOSE}")
_MOST_BEHIND = 8192
"""Characters behind the marks that end a call in which a value's own mark may come yet."""


class Qwen3CoderParser(CallMachine):
    """Finds them. Texts come piece by piece, other values whole. A value whose own mark is missing ends with the call,
    or in front of a parameter that the tool has and the call had not yet. What stands behind a mark and is no call is
    text, with its marks. Models leave out the outer marks at times: without them it is a call of a tool of the
    request's."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin.

        Args:
            schemas: of the arguments of the request's tools, by the tools' names.
        """
        super().__init__()
        self._schemas = schemas
        self._opening = ""

    def _begin(self) -> bool:
        mark = self._say_until(OPEN, FUNCTION)
        if not mark:
            return False
        self._is_marked, self._is_begun, self._opening = mark == OPEN, False, ""
        if self._is_marked:
            self._opening = self._take(len(OPEN))
        return self._go(self._read_function)

    def _read_function(self) -> bool:
        self._opening += self._skip_blanks()
        return self._read_named(FUNCTION, self._begin_function)

    def _read_named(self, mark: str, state: Any) -> bool:
        """A mark with a name in it, and what to do with that; else it is no call."""
        if (not self._text or may_become(self._text, mark)) and not self._is_over:
            return False
        found = _NAME.match(self._text, len(mark)) if self._text.startswith(mark) else None
        if found is not None:
            self._opening += self._take(found.end())
            return bool(state(found[1]))
        rest = self._text[len(mark) :]
        may_be = self._text.startswith(mark) and len(rest) <= _MOST_NAME and not set("<>\n") & set(rest)
        if may_be and (self._is_begun or not self._is_over):
            self._take(len(self._text) if self._is_over else 0)  # a mark that was cut
            return False
        if mark == FUNCTION and self._text.startswith(FUNCTION):
            self._opening += self._take(len(FUNCTION))  # which is not looked at again
        return self._give_up()

    def _begin_function(self, name: str) -> bool:
        if not name.strip() or not (self._is_marked or name in self._schemas):
            return self._give_up()
        self._name, self._given = name, set[str]()
        properties = self._schemas.get(name, {}).get("properties")
        self._names = properties.keys() if isinstance(properties, Mapping) else ()
        return self._go(self._read_member)

    def _read_member(self) -> bool:
        """Read a parameter of a call, or its end."""
        self._opening += self._skip_blanks()
        ends = (END, CLOSE)
        if not self._text and not self._is_over:
            return False
        if self._text.startswith(ends):
            self._tell_begin("}" if self._is_begun else "{}")
            self._is_begun = False
            if self._text.startswith(END):
                self._take(len(END))
            return self._go(self._read_close)
        may_be = any(may_become(self._text, mark) for mark in (*ends, PARAMETER))
        if may_be and (self._is_begun or not self._is_over):
            self._take(len(self._text) if self._is_over else 0)  # a mark that was cut
            return False
        return self._read_named(PARAMETER, self._begin_value)

    def _begin_value(self, key: str) -> bool:
        parameters = self._schemas.get(self._name, {})
        self._given.add(key)
        self._types = types_of(schema_of(parameters, key), parameters)
        self._is_text, self._value, self._is_first = self._types == {"string"}, list[str](), True
        opening = f"{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_text else "")
        self._tell_begin(("{" if not self._is_begun else ", ") + opening)
        return self._go(self._read_value)

    def _tell_begin(self, arguments: str) -> None:
        """What is told of arguments, behind the call's beginning where that was not told yet."""
        self._tell([*([] if self._is_begun else [CallBegin(self._name)]), Arguments(arguments)])
        self._is_begun, self._opening = True, ""

    def _read_value(self) -> bool:
        """A value: a line break at its beginning and one at its end are the mark's."""
        if self._is_first and self._text:
            self._is_first = False
            if self._text.startswith("\n"):
                self._take(1)
        place, mark = find_mark(self._text, _ENDS_OF_VALUES)
        self._add_to_value(self._take(len(self._text) if self._is_over and not mark else place))
        if not mark:
            if self._is_over and not self._is_text:
                self._tell([Arguments("".join(self._value).strip())])  # as far as it has come
            return False
        is_end = mark.endswith(END_PARAMETER) or self._is_end(mark)
        if is_end is None:
            return False
        if not is_end:
            self._add_to_value(self._take(len(mark)))
            return True
        if mark.endswith(END_PARAMETER):
            self._take(len(mark))
        self._tell([Arguments('"' if self._is_text else as_json("".join(self._value), self._types))])
        return self._go(self._read_member)

    def _add_to_value(self, piece: str) -> None:
        if self._is_text:
            self._tell([Arguments(json.dumps(piece, ensure_ascii=False)[1:-1])])
        else:
            self._value.append(piece)

    def _is_end(self, mark: str) -> bool | None:
        """Whether a value that lacks its own mark ends in front of another one, with which the text begins; None while
        that is not certain. A text may hold such marks."""
        if mark == _NEXT:
            found = _NEXT_NAME.match(self._text)
            if found is not None:
                return found[1] in self._names and found[1] not in self._given
            may_come = not self._is_over and _MAY_BE_NEXT.fullmatch(self._text) is not None
            return None if may_come else False
        found = _CALL_END.match(self._text)
        if found is None:
            may_be = may_become(self._text.lstrip("\n").removeprefix(END).lstrip(), CLOSE)
            return None if may_be and not self._is_over else may_be and mark.startswith("\n")
        behind = self._text[found.end() : found.end() + _MOST_BEHIND]
        place, next_mark = find_mark(behind, (END_PARAMETER, OPEN))
        if not next_mark and len(behind) < _MOST_BEHIND and not self._is_over:
            return None
        # The value's own mark comes still: then this one was its text.
        is_own = next_mark == END_PARAMETER
        return not is_own and (found[1] is not None or not behind[: place if next_mark else None].strip())

    def _read_close(self) -> bool:
        """Read what follows a call: its mark, or another call within the same marks."""
        self._skip_blanks()
        if any(may_become(self._text, mark) for mark in (CLOSE, FUNCTION)):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        if self._text.startswith(FUNCTION) and self._is_marked:
            return self._go(self._read_function)
        if self._text.startswith(CLOSE):
            self._take(len(CLOSE))
        return self._go(self._begin)

    def _give_up(self) -> bool:
        """What stands next is no part of a call; what was taken for one is text."""
        if self._is_begun and not self._is_over:
            self._tell([Arguments("}")])
        self._say(self._opening)
        return self._go(self._begin)
