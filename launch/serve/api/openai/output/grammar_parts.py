"""Parts of grammars in llguidance's Lark: rules and JSON schemas, and what is wanted of an answer.

Marks that are special tokens, or hold one, stand in a grammar with its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trtrun.chats.tools import Tool
from trtrun.core.guide import MOST_GUIDE_CHARACTERS, OPTIONS_KEY
from trtrun.errors import InvalidRequestError
from trtrun.guiding.json_schemas import close, patterns_of


@dataclass(frozen=True)
class Wanted:
    """What a text may be.

    Attributes:
        tools: that may be called.
        must_call: it is calls, and nothing else.
        in_parallel: several calls are allowed.
        other: what it must be otherwise, in Lark; None for any text.
        other_schema: the same, where it is JSON of a schema.
        has_arguments_in_brackets: a call is a name and its arguments, in Mistral's newer form.
        open_mark: of thoughts that it may begin with; empty where it may not.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    in_parallel: bool = True
    other: str | None = None
    other_schema: Any = None
    has_arguments_in_brackets: bool = False
    open_mark: str = ""


class Lark:
    """Rules of a grammar, as they are put down."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._tokens = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
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
        """A text with the special tokens in it."""
        return " ".join(self._part(piece) for piece in self._pieces(text))

    def _part(self, piece: str) -> str:
        return f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)

    def _pieces(self, text: str) -> list[str]:
        """A text cut into special tokens and what is between them."""
        if self._tokens is None:
            return [text]
        found = list(self._tokens.finditer(text))
        cuts = [0, *(place for one in found for place in one.span()), len(text)]
        return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]

    def until(self, text: str, *absent: str) -> str:
        """Any text that does not hold some others, and a mark, which it does not hold."""
        return self.ended(self.without(*absent) if absent else "TEXT", text)

    def ended(self, before: str, text: str) -> str:
        """Text of a terminal, and a mark, which it does not hold."""
        first, *others = self._pieces(text)
        if first in self._special:
            return f"{before} {self.mark(text)}"
        number = len(self._rules)
        if others:  # no text goes on with the special token: so what precedes that is the end of this one
            head = self.put(f"HEAD_{number}", f"{before} {self._part(first)}")
            return " ".join([head, *map(self._part, others)])
        name = f"until_{number}"
        return self.put(f"{name}[lazy]", f"{before} {self.mark(text)}").removesuffix("[lazy]")

    def without(self, *texts: str) -> str:
        """Any text that holds no mark of some."""
        parts = ["/(.|\n)*/"]
        for escaped in filter(None, map(self.escaped, texts)):
            parts.append(rf"~/(.|\n)*{escaped}(.|\n)*/")
        return self.put(f"PLAIN_{len(self._rules)}", " & ".join(parts)) if len(parts) > 1 else "TEXT"

    def escaped(self, text: str) -> str:
        """A text as a regular expression has it; nothing for one with a special token, which no text holds."""
        if self._tokens is not None and self._tokens.search(text):
            return ""
        return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")

    def whole(self, start: str) -> str:
        """All of it."""
        rules = [f"{name}: {rule}" for name, rule in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = ("title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly")
_VALUES = ("enum", "const")
ANY: Mapping[str, Any] = {"type": "object"}


def repeated(rule: str, between: str, wanted: Wanted) -> str:
    """One of a rule, or several where these are wanted, with another rule between them."""
    return f"{rule} ({between} {rule})*" if wanted.in_parallel else rule


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
