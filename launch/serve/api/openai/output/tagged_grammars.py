"""Grammars of calls whose arguments are text between marks.

A value is text within its lengths and pattern, one of several constants, or JSON of its schema; arguments stand in the
order of the tool's schema.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from launch.serve.api.openai.output.grammar_parts import Lark, Wanted, arguments_schema, as_part, repeated
from launch.serve.api.openai.output.tags import Tags
from launch.serve.api.openai.output.text_values import resolved, types_of
from trtrun.chats.tools import Tool
from trtrun.core.guide import OPTIONS_KEY
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError
from trtrun.guiding.json_schemas import alternatives_of, patterns_of

_KNOWN = ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
_OF_TEXT = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "$ref")
_ANY_TEXT = r"/(.|\n)*/"
_MOST_DEEP = 8


def tagged_calls(lark: Lark, wanted: Wanted, tags: Tags) -> str:
    """Calls alone."""
    call = f"{lark.mark(tags.open)} {tagged_rest(lark, wanted, tags)}"
    return call if tags.holds_all else repeated(call, _between(tags), wanted)


def tagged_free(lark: Lark, wanted: Wanted, tags: Tags) -> str:
    """Text with calls in it. Without the outer mark there is no call: what stands in one would not be guided."""
    marked, often = tagged_rest(lark, wanted, tags), "*" if wanted.in_parallel else "?"
    return f"({lark.until(*tags.call_marks)} {marked}){often} {lark.without(*tags.call_marks)}"


def tagged_behind(lark: Lark, wanted: Wanted, tags: Tags) -> str:
    """The rest of a call behind its mark, and what an answer may go on with."""
    marked, is_alone = tagged_rest(lark, wanted, tags), wanted.must_call or wanted.other is not None
    if not is_alone:
        behind = tagged_free(lark, wanted, tags) if wanted.in_parallel else lark.without(*tags.call_marks)
        return f"{marked} {behind}"
    if tags.holds_all or not wanted.in_parallel:
        return marked
    return f"{marked} ({_between(tags)} {lark.mark(tags.open)} {marked})*"


def tagged_rest(lark: Lark, wanted: Wanted, tags: Tags) -> str:
    """A call behind its opening mark, or all of them, where the mark is that of all: put down once, as each argument
    has rules of its own."""
    if lark.has("marked"):
        return "marked"
    begin, end = "\n" if tags.call else "", f"{tags.end}\n" if tags.end else ""
    if tags.holds_all:
        lark.put("call", " | ".join(_calls(lark, wanted, tags, "", end)))
        often = "+" if wanted.in_parallel else ""
        return lark.put("marked", f"{lark.mark(begin)} call{often} {lark.mark(tags.close)}")
    return lark.put("marked", " | ".join(_calls(lark, wanted, tags, begin, f"{end}{tags.close}")))


def _calls(lark: Lark, wanted: Wanted, tags: Tags, begin: str, end: str) -> list[str]:
    """A rule for the call of each tool."""
    rules = []
    for number, tool in enumerate(wanted.tools):
        is_bound = tool.is_strict or wanted.must_call
        told = ParameterRules(lark, tags).of_tool(tool) if is_bound else free_parameters(lark, tags)
        head = lark.mark(f"{begin}{tags.call}{tool.name}{tags.call_end}")
        rules.append(lark.put(f"call_{number}", f"{head} {told} {lark.mark(end)}"))
    return rules


def _between(tags: Tags) -> str:
    return json.dumps(tags.between) if tags.between else ""


def free_parameters(lark: Lark, tags: Tags) -> str:
    """Any parameters."""
    rules, name = ParameterRules(lark, tags), lark.put("KEY", f"/{_letters(tags)}{{1,256}}/")
    openings = dict.fromkeys((tags.text_opening, tags.other_opening))
    opening = " | ".join(map(lark.mark, openings))
    text = rules.text(_ANY_TEXT, {})
    return lark.put("free_parameter", f"{lark.mark(tags.parameter)} {name} ({opening}) {text}") + "*"


def _letters(tags: Tags) -> str:
    return r'[^\s<>"]' if tags.parameter.endswith('"') else r"[^\s<>]"


class ParameterRules:
    """Rules for the arguments of one tool."""

    def __init__(self, lark: Lark, tags: Tags) -> None:
        """Begin, with the rules that there are and the marks of the form."""
        self._lark = lark
        self._tags = tags
        self._closing = ("\n" if tags.has_lines else "") + tags.end_parameter + tags.line
        # Texts and other values that begin alike do so with the argument's name, else each by itself.
        self._begin_alike = tags.text_opening == tags.other_opening
        self._choices: dict[int, str] = {}

    def of_tool(self, tool: Tool) -> str:
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
            return free_parameters(self._lark, self._tags)
        for name in required:
            if is_strict and name not in properties:
                raise _unfollowed(where, f"requires {name!r}, which is not among its properties")
        rules: list[str] = []
        for name, schema in properties.items():
            if not re.fullmatch(f"{_letters(self._tags)}{{1,256}}", name):
                raise _unfollowed(where, f"has a name with blanks or brackets, {name!r}")
            opening = f"{self._tags.parameter}{name}" + (self._tags.text_opening if self._begin_alike else "")
            value = self._value(f"{where}.properties.{name}", schema, parameters, is_strict)
            rule = f"{self._lark.mark(opening)} {value}"
            rules.append(rule if name in required else f"({rule})?")
        return " ".join(rules)

    def _value(self, where: str, schema: Any, root: Mapping[str, Any], is_strict: bool, depth: int = 0) -> str:
        """A value, and the marks beside it. Rules of alternatives are put down once, as many others may name them."""
        if depth > _MOST_DEEP:
            raise _unfollowed(where, f"has anyOf within anyOf, {_MOST_DEEP} deep or within itself")
        types = types_of(schema, root)
        if "string" not in types:
            return self._other(self._json(schema, root))
        schema = resolved(schema, root)
        if not isinstance(schema, Mapping):
            return self._open_text(_ANY_TEXT, root)
        for key in schema:
            if is_strict and key not in _OF_TEXT and types == {"string"}:
                raise _unfollowed(where, f"has {key}")
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            return self._one_of(where, choices)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                if id(schema) not in self._choices:
                    items = [self._value(where, item, root, is_strict, depth + 1) for item in schema[key]]
                    self._choices[id(schema)] = self._lark.put(f"choice_{self._lark.size}", " | ".join(items))
                return self._choices[id(schema)]
        if types != {"string"} and set(schema) & {"minLength", "maxLength", "pattern"}:
            if is_strict:
                raise _unfollowed(where, "is a text among others, with lengths or a pattern")
            return self._open_text(_ANY_TEXT, root)
        if types != {"string"} and not self._begin_alike:
            others = {**schema, "type": sorted(types - {"string"})}
            return f"({self._open_text(_ANY_TEXT, root)} | {self._other(self._json(others, root))})"
        return self._open_text(_pattern(schema), root)

    def _one_of(self, where: str, choices: Sequence[Any]) -> str:
        """One of several constants."""
        texts = [choice for choice in choices if isinstance(choice, str)]
        others = [json.dumps(choice, ensure_ascii=False) for choice in choices if not isinstance(choice, str)]
        if any(self._tags.end_parameter in choice for choice in (*texts, *others)):
            raise _unfollowed(where, f"has a value with {self._tags.end_parameter}")
        if self._begin_alike:
            return self._other(self._literals([*texts, *others]))
        told = [f"{self._lark.mark(self._tags.text_opening)} {self._closed(self._literals(texts))}"] if texts else []
        return f"({' | '.join([*told, *([self._other(self._literals(others))] if others else [])])})"

    def _literals(self, choices: Sequence[str]) -> str:
        return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)})"

    def _closed(self, value: str) -> str:
        return f"{value} {self._lark.mark(self._closing)}"

    def _other(self, value: str) -> str:
        """A value that is no text, with its opening, where that is its own."""
        opening = "" if self._begin_alike else f"{self._lark.mark(self._tags.other_opening)} "
        return opening + self._closed(value)

    def _open_text(self, pattern: str, root: Mapping[str, Any]) -> str:
        """A text, with its opening, where that is its own."""
        opening = "" if self._begin_alike else f"{self._lark.mark(self._tags.text_opening)} "
        return opening + self.text(pattern, root)

    def text(self, pattern: str, root: Mapping[str, Any]) -> str:
        """Text that a pattern allows, up to the mark behind it, which it does not hold; nor what parsers take for the
        next parameter."""
        lark, end = self._lark, self._tags.end_parameter
        absent = self._without_names(root)
        text = lark.put(f"VALUE_{lark.size}", f"{pattern} & {lark.without(end)} & {absent}")
        return lark.ended(text, self._closing)

    def _without_names(self, root: Mapping[str, Any]) -> str:
        properties, tags = root.get("properties"), self._tags
        begin = self._lark.escaped(tags.parameter)
        if not isinstance(properties, Mapping) or len(properties) < 2 or not begin:
            return "TEXT"
        names = "|".join(map(self._lark.escaped, properties))
        rule = rf"~/(.|\n)*\n{begin}({names})>\n(.|\n)*/" if tags.has_lines else rf"~/(.|\n)*{begin}({names})(.|\n)*/"
        return self._lark.put(f"NO_NAMES_{zlib.crc32(rule.encode())}", rule)

    def _json(self, schema: Any, root: Mapping[str, Any]) -> str:
        parts = {key: root[key] for key in ("$defs", "definitions", OPTIONS_KEY) if key in root}
        whole = {**schema, **parts} if isinstance(schema, Mapping) else schema
        return self._lark.put(f"json_{self._lark.size}", as_part(whole))


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


def _unfollowed(where: str, line: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {line}: this model's calls, whose arguments are texts, cannot be held to that")
