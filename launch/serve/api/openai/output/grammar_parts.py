"""Parts of grammars in llguidance's Lark: rules, JSON schemas, and parameters that are written one by one as text.

Marks that are special tokens stand in a grammar as their ids. A parameter's value is text within its lengths and
pattern, one of several constants, or JSON of its schema; parameters stand in the order of the tool's schema.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from launch.serve.api.openai.output.qwen3_coder import END_PARAMETER, PARAMETER, resolved, types_of
from trtrun.chats.tools import Tool
from trtrun.core.guide import MOST_GUIDE_CHARACTERS, OPTIONS_KEY
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError
from trtrun.guiding.json_schemas import alternatives_of, close, patterns_of


class Lark:
    """Rules of a grammar, as they are put down."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {"TEXT": r"/(.|\n)*/", "BLANKS": r"/\s*/"}
        self._characters = 0

    @property
    def size(self) -> int:
        """How many rules there are."""
        return len(self._rules)

    def has(self, name: str) -> bool:
        """Whether a rule of that name was put down."""
        return name in self._rules

    def put(self, name: str, rule: str) -> str:
        """Put down a rule; returns its name.

        Raises:
            InvalidRequestError: all are longer than a grammar may be: not written first, as each parameter of a tool
                may have a rule that holds all that its schema defines.
        """
        self._characters += len(rule) - len(self._rules.get(name, ""))
        if self._characters > MOST_GUIDE_CHARACTERS:
            raise InvalidRequestError(
                f"tools: what guides the answer is longer than {MOST_GUIDE_CHARACTERS} characters, which are the most"
            )
        self._rules[name] = rule
        return name

    def mark(self, text: str) -> str:
        """A mark."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    def until(self, text: str, *absent: str) -> str:
        """Any text that does not hold some others, and a mark, which it does not hold."""
        before = self.without(*absent) if absent else "TEXT"
        if text in self._special:
            return f"{before} {self.mark(text)}"
        name = f"until_{len(self._rules)}"
        return self.put(f"{name}[lazy]", f"{before} {self.mark(text)}").removesuffix("[lazy]")

    def without(self, *texts: str) -> str:
        """Any text that holds no mark of some."""
        parts = ["/(.|\n)*/"]
        for escaped in filter(None, map(self.escaped, texts)):
            parts.append(rf"~/(.|\n)*{escaped}(.|\n)*/")
        return self.put(f"PLAIN_{len(self._rules)}", " & ".join(parts)) if len(parts) > 1 else "TEXT"

    def escaped(self, text: str) -> str:
        """A text as a regular expression has it; nothing for a special token, which no text holds."""
        return "" if text in self._special else re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")

    def whole(self, start: str) -> str:
        """All of it."""
        rules = [f"{name}: {rule}" for name, rule in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])


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


_KNOWN = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
_OF_TEXT = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "$ref")
_KEY = re.compile(r"[^\s<>]{1,256}")
_CLOSED = json.dumps(f"\n{END_PARAMETER}\n")
_ANY_TEXT = r"/(.|\n)*/"
_MOST_DEEP = 8


def free_parameters(lark: Lark) -> str:
    """Any parameters."""
    lark.put("KEY", r"/[^\s<>]{1,256}/")
    return lark.put("free_parameter", f'"{PARAMETER}" KEY ">\\n" {_text(lark, _ANY_TEXT, {})}') + "*"


def parameter_rules(lark: Lark, tool: Tool) -> str:
    """The parameters of a tool, in the order that its schema has. Others than it names are not written, unless it
    names none. Of a tool that is not strict, what cannot be followed is left out.

    Raises:
        InvalidRequestError: its schema says something that calls in this form cannot be held to.
    """
    parameters, is_strict = arguments_schema(tool), tool.is_strict
    where = f"{tool.place}.function.parameters"
    for key in parameters:
        if is_strict and key not in _KNOWN and not key.startswith("x-"):
            raise _unfollowed(where, f"has {key} at its root")
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = parameters.get("required", ())
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"{where}.required must be a list of names, not {show_value(required)}")
    if not properties and not required and parameters.get("additionalProperties", True) is True:
        return free_parameters(lark)
    for name in required:
        if is_strict and name not in properties:
            raise _unfollowed(where, f"requires {name!r}, which is not among its properties")
    rules: list[str] = []
    choices: dict[int, str] = {}
    for name, schema in properties.items():
        if not _KEY.fullmatch(name):
            raise _unfollowed(where, f"has a name with blanks or brackets, {name!r}")
        opening = json.dumps(f"{PARAMETER}{name}>\n", ensure_ascii=False)
        value = _value(lark, f"{where}.properties.{name}", schema, parameters, is_strict, choices)
        rule = f"{opening} {value}"
        rules.append(rule if name in required else f"({rule})?")
    return " ".join(rules)


def _value(
    lark: Lark,
    where: str,
    schema: Any,
    root: Mapping[str, Any],
    is_strict: bool,
    known: dict[int, str],
    depth: int = 0,
) -> str:
    """A value, and the mark behind it. `known`: rules of alternatives, put down once, as many others may name them."""
    if depth > _MOST_DEEP:
        raise _unfollowed(where, f"has anyOf within anyOf, {_MOST_DEEP} deep or within itself")
    types = types_of(schema, root)
    if "string" not in types:
        return f"{_json(lark, schema, root)} {_CLOSED}"
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return _text(lark, _ANY_TEXT, root)
    for key in schema:
        if is_strict and key not in _OF_TEXT and types == {"string"}:
            raise _unfollowed(where, f"has {key}")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        told = [choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False) for choice in choices]
        if any(END_PARAMETER in choice for choice in told):
            raise _unfollowed(where, f"has a value with {END_PARAMETER}")
        return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in told)}) {_CLOSED}"
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            if id(schema) not in known:
                items = [_value(lark, where, item, root, is_strict, known, depth + 1) for item in schema[key]]
                known[id(schema)] = lark.put(f"choice_{lark.size}", " | ".join(items))
            return known[id(schema)]
    if types != {"string"} and set(schema) & {"minLength", "maxLength", "pattern"}:
        if is_strict:
            raise _unfollowed(where, "is a text among others, with lengths or a pattern")
        return _text(lark, _ANY_TEXT, root)
    return _text(lark, _pattern(schema), root)


def _pattern(schema: Mapping[str, Any]) -> str:
    """What a text is, as an intersection of regular expressions."""
    parts = [_ANY_TEXT]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(rf"/(.|\n){{{least},{most}}}/")
    pattern = schema.get("pattern")
    for inner in (patterns_of(pattern) or [pattern]) if isinstance(pattern, str) else ():
        parts.append(f"/{'|'.join(map(_whole, alternatives_of(inner)))}/")
    return " & ".join(parts)


def _whole(inner: str) -> str:
    """A regular expression that a whole text matches, of one of which it has a match somewhere."""
    begin = "" if inner.startswith("^") else r"(.|\n)*"
    end = "" if inner.endswith(("$", r"\z")) and not inner.endswith(r"\$") else r"(.|\n)*"
    inner = inner.removeprefix("^") if begin == "" else inner
    inner = inner.removesuffix("$").removesuffix(r"\z") if end == "" else inner
    inner = re.sub(r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], inner)
    return f"{begin}({inner}){end}"


def _text(lark: Lark, pattern: str, root: Mapping[str, Any]) -> str:
    """Text that a pattern allows, up to the mark behind it, which it does not hold; nor a line that parsers take for
    the next parameter."""
    number = lark.size
    text = lark.put(f"VALUE_{number}", f"{pattern} & {lark.without(END_PARAMETER)} & {_without_names(lark, root)}")
    return lark.put(f"value_{number}[lazy]", f"{text} {_CLOSED}").removesuffix("[lazy]")


def _without_names(lark: Lark, root: Mapping[str, Any]) -> str:
    properties = root.get("properties")
    if not isinstance(properties, Mapping) or len(properties) < 2:
        return "TEXT"
    names = "|".join(map(lark.escaped, properties))
    rule = rf"~/(.|\n)*\n{PARAMETER}({names})>\n(.|\n)*/"
    return lark.put(f"NO_NAMES_{zlib.crc32(rule.encode())}", rule)


def _json(lark: Lark, schema: Any, root: Mapping[str, Any]) -> str:
    parts = {key: root[key] for key in ("$defs", "definitions", OPTIONS_KEY) if key in root}
    whole = {**schema, **parts} if isinstance(schema, Mapping) else schema
    return lark.put(f"json_{lark.size}", as_part(whole))


def _unfollowed(where: str, line: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {line}: this model's calls, whose arguments are texts, cannot be held to that")
