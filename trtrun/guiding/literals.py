"""The texts that a guide spells out, as far as they can be read without its grammar: what a tokenizer would read as a
special token in them could not be told as text. It knows guides' forms, and no tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trtrun.core.guide import Guide

_ANNOTATIONS = ("title", "description", "$comment")
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)(?:"|\\?\Z)|/((?:\\.|[^/\\\n])*)(?:/|\n|\\?\Z)', re.DOTALL)
"""Texts and regular expressions of a grammar, closed or not, so that none is looked at twice. What stands outside of
them may name special tokens."""


def literals(guide: Guide) -> Iterator[str]:
    """Texts that sentences of a guide may hold, and others that stand in it; not those that its rules put together."""
    if guide.kind == "choice":
        yield from json.loads(guide.text)
    elif guide.kind == "regex":
        yield _unescaped(guide.text)
    elif guide.kind == "json":
        yield from _of_schema(json.loads(guide.text))
    else:
        for text, regex in _QUOTED.findall(guide.text):
            yield _unescaped(text or regex)


def _of_schema(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
            if "\\" in part:  # a pattern
                yield _unescaped(part)
        elif isinstance(part, Mapping):
            yield from part
            # Which are texts where they describe, and schemas where they name a property.
            left += [inner for key, inner in part.items() if key not in _ANNOTATIONS or not isinstance(inner, str)]
        elif isinstance(part, list):
            left += part


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
