"""What a guide may take: the grammar engine's own bounds, and bounds on what it does not bound itself.

The engine follows rules, references and nested parts recursively, so that a guide that is too deep would overflow the
stack and end the process: the depth of a guide, along its nesting and its references, is computed here, with one visit
to each part. It also has a state for each remainder of a multiple.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

from llguidance import LLParserLimits

from trtrun.core.guide import Guide
from trtrun.errors import InvalidRequestError

_IDS = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef")
_WORD = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?![/*])(?:\\.|[^/\\\n])+/?|(?P<set>\[(?:\\.|[^\[\]\\\n])*\])|//[^\n]*|#[^\n]*'
    r"|(?P<head>(?:^|(?<=\n))[ \t]*[?!]?(?P<name>[\w-]+)[^\n:\"/#(]{0,64}?:+=?)|(?P<open>[([{])|(?P<close>[)\]}])"
    r"|(?P<word>[A-Za-z_][\w-]*)",
    re.DOTALL,
)
"""Parts of a grammar in Lark or GBNF: texts, expressions and remarks, which are passed by; sets of characters, heads of
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


_MOST_RULES = 600
_MOST_DEPTH = 500
"""The most parts, rules and brackets within one another, along references. The engine takes up to 8 KiB of stack for
each, and has `trtrun.threads.DEEP_STACK`."""
_MOST_REMAINDERS = 10_000
_RULE = re.compile(r":+=?")
_SCHEMA = re.compile(r"%json\s*")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]+)')


def limits() -> LLParserLimits:
    """What a grammar may take: about 20 ms to build, 15 ms and 10 ms at worst for the lexer and the parser of a
    position, and memory for 50,000 states of the lexer, of one to two kilobytes each."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_bounds(guide: Guide) -> None:
    """Refuse what would take the whole process along, or all of its memory.

    Raises:
        InvalidRequestError: a schema refers to too many others, a grammar has too many rules, parts are nested too
            deep, or multiples are of numbers that are too large together.
    """
    if guide.kind == "json":
        schema = json.loads(guide.text)
        _check_references(schema)
        _check_depth("JSON schema", depth_of_schema(schema))
        pairs = _pairs(schema)
        _check_multiples(str(value) for name, value in pairs if name == "multipleOf")
    elif guide.kind == "grammar":
        rules, schemas = _parted(guide.text)
        for schema in schemas:
            _check_references(schema)
            _check_depth("JSON schema in the grammar", depth_of_schema(schema))
        count = len(_RULE.findall(rules))
        if count > _MOST_RULES:
            raise InvalidRequestError(
                f"guided: the grammar has {count} rules, as its colons count; {_MOST_RULES} are the most"
            )
        _check_depth("grammar", depth_of_rules(rules))
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), guide.text)
        _check_multiples(_MULTIPLE.findall(text))


def _check_depth(name: str, depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise InvalidRequestError(
            f"guided: the {name} is nested {depth} deep along its references, and {_MOST_DEPTH} is the most"
        )


def _check_references(schema: Any) -> None:
    targets = {value for name, value in _pairs(schema) if name in ("$ref", "$dynamicRef") and isinstance(value, str)}
    if len(targets) > _MOST_RULES:
        raise InvalidRequestError(f"guided: the JSON schema refers to {len(targets)} parts; {_MOST_RULES} are the most")


def _parted(grammar: str) -> tuple[str, list[Any]]:
    """A grammar without the JSON schemas in it, and these, whose colons are no rules."""
    rules, schemas, place = [], [], 0
    for found in _SCHEMA.finditer(grammar):
        if found.start() < place:
            continue  # within a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # the grammar engine says what is wrong
        rules.append(grammar[place : found.start()])
        schemas.append(schema)
        place = end
    return "".join([*rules, grammar[place:]]), schemas


def _check_multiples(numbers: Iterable[str]) -> None:
    """Check all multiples together, as one text may have to be a multiple of each of them."""
    common = 1
    for number in numbers:
        try:
            _, digits, _ = Decimal(number).as_tuple()
        except InvalidOperation:
            continue  # the grammar engine says what is wrong
        common = math.lcm(common, _without_tens(digits))
        if common > _MOST_REMAINDERS:
            raise InvalidRequestError(
                "guided: multipleOf takes too much: least common multiple of its numbers, without zeros at the end, "
                f"may be {_MOST_REMAINDERS} at most"
            )


def _without_tens(digits: Sequence[int]) -> int:
    """A number without its zeros at the end, which take a state each; 1 of 0. Of one with more digits than may be, the
    first ones, which are too many already: Python makes no number of thousands of digits."""
    kept = "".join(map(str, digits)).strip("0")[: len(str(_MOST_REMAINDERS)) + 1]
    return int(kept or 1)


def _pairs(schema: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of all objects within a schema."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield from part.items()
            left += part.values()
        elif isinstance(part, list):
            left += part
