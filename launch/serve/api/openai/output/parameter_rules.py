"""Rules of parameters that are written one by one as text, in the order of a tool's schema.

A value is text, within its lengths and pattern, one of some, or JSON of its schema. It knows Lark and JSON schemas, and
no tokenizer.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from launch.serve.api.openai.output.lark import Lark
from launch.serve.api.openai.output.parameters import resolved, types_of
from launch.serve.api.openai.output.qwen3_coder import END_PARAMETER, PARAMETER
from launch.serve.api.openai.output.schemas import arguments_schema, as_part
from trtrun.chats.tools import Tool
from trtrun.core.guide import OPTIONS_KEY
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError
from trtrun.guiding.schema_rewrites import alternatives_of, patterns_of

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
