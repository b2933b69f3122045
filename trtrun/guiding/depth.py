"""How deep a guide is, along its nesting and its references: as deep as the grammar engine recurses while it builds it,
which visits each part once.

It knows guides' forms. It does not know what may be too deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_IDS = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef")
_WORD = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?![/*])(?:\\.|[^/\\\n])+/?|(?P<set>\[(?:\\.|[^\[\]\\\n])*\])|//[^\n]*|#[^\n]*'
    r"|(?P<head>(?:^|(?<=\n))[ \t]*[?!]?(?P<name>[\w-]+)[^\n:\"/#(]{0,64}?:+=?)|(?P<open>[([{])|(?P<close>[)\]}])"
    r"|(?P<word>[A-Za-z_][\w-]*)",
    re.DOTALL,
)
"""Of a grammar in Lark or GBNF: texts, expressions and remarks, which are passed by; sets of characters, heads of
rules, brackets and names of rules."""


def depth_of_schema(schema: Any) -> int:
    """Objects within one another on the longest way through a JSON schema and what it refers to, each taken once."""
    names = dict(_named(schema))
    deepest, seen, left = 0, set[int](), [(schema, 0)]
    while left:
        part, depth = left.pop()
        if id(part) in seen or not isinstance(part, Mapping | list):
            continue
        seen.add(id(part))
        if isinstance(part, list):
            left += [(inner, depth) for inner in reversed(part)]
            continue
        depth += 1
        deepest = max(deepest, depth)
        left += [(inner, depth) for inner in reversed([*part.values()])]
        targets = [part[key] for key in _REFERENCES if isinstance(part.get(key), str)]
        left += [(_target(schema, names, target), depth) for target in targets]
    return deepest


def _named(schema: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a schema that have a name, by it."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, Mapping):
            left += part.values()
            for keys, begin in ((_IDS, ""), (_ANCHORS, "#")):
                yield from ((begin + part[key], part) for key in keys if isinstance(part.get(key), str))


def _target(schema: Any, names: Mapping[str, Any], reference: str) -> Any:
    """The part that a reference leads to; None where it leads nowhere."""
    if reference in names:
        return names[reference]
    base, _, pointer = reference.partition("#")
    part = names.get(base, schema)
    if pointer and not pointer.startswith("/"):
        return names.get(f"#{pointer}")
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(step)
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part


def depth_of_rules(grammar: str) -> int:
    """Rules and brackets within one another on the longest way through a grammar, each rule taken once."""
    names: dict[str, list[str]] = {}
    nested: dict[str, int] = {}
    name, level = "", 0
    for found in _WORD.finditer(grammar):
        if found["head"]:
            name, level = found["name"], 0
            names.setdefault(name, [])
        elif found["open"]:
            level += 1
            nested[name] = max(nested.get(name, 0), level)
        elif found["close"]:
            level = max(0, level - 1)
        elif found["word"]:
            names.setdefault(name, []).append(found["word"])
        elif found["set"]:  # in Lark what may be left out
            names.setdefault(name, []).extend(re.findall(r"[A-Za-z_][\w-]*", found["set"]))
    deepest, seen = 0, set[str]()
    for first in ("start", "root", *names):
        left = [(first, 0)]
        while left:
            rule, depth = left.pop()
            if rule in seen or rule not in names:
                continue
            seen.add(rule)
            depth += 1 + nested.get(rule, 0)
            deepest = max(deepest, depth)
            left += [(inner, depth) for inner in reversed(names[rule])]
    return deepest
