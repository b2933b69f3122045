"""What is wrong with a guide, in one line; of a JSON schema also where: a pointer to the innermost part of which the
grammar engine says by itself what it says of the whole.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher

from trtrun.core.guide import OPTIONS_KEY, Guide
from trtrun.core.values import cut_text
from trtrun.guiding.bounds import limits

WORDS = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "list of texts",
    "grammar": "grammar",
}
_MOST_LOOKED_AT = 200
_MOST_SECONDS = 1.0
"""Parts of a schema that are tried on their own to find the one that is wrong, and processor time after which no other
one is: each may take as long as the whole."""
_MOST_SAID = 300
_ROOT = "its root"
_SHOWN = re.compile(r"\d+ \|")
"""A line of a grammar that the library shows around an error."""
_HINT = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ADVICE = "Use anyOf, or set coerce_one_of in x-guidance at the schema's root, which takes oneOf as anyOf"
_WITHIN = re.compile(r" while processing \S+$")
_NAMES = ("$id", "id")
_WHOLE = "x-whole"
"""Where a schema lies as a whole beside the part of it that is tried."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
"""Where a JSON schema has others in a list, by name, and one."""


@lru_cache(maxsize=16)
def complaint(guide: Guide, error: str) -> str:
    """What is wrong with a guide, in one line."""
    said = in_words(error)
    if guide.kind != "json":
        return f"guided: the {WORDS[guide.kind]} cannot be followed: {said}"
    try:
        where, said = _find_wrong_part(guide.text, said)
    except RecursionError:  # where they are nested as deep as Python reads them
        where = _ROOT
    return f"guided: the {WORDS['json']} cannot be followed at {cut_text(where, _MOST_SAID)}: {said}"


def in_words(error: str) -> str:
    """The line of an error, without what the library shows around it."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").replace(_HINT, _ADVICE).splitlines()]
    kept = [line for line in lines if line.strip("^ ") and not _SHOWN.match(line)]
    return cut_text(" ".join(kept or ["it cannot be followed"]), _MOST_SAID)


def _find_wrong_part(text: str, said: str) -> tuple[str, str]:
    """A pointer to the innermost part of a schema of which by itself the same is said as of the whole, and that."""
    where, part, budget, found = "", json.loads(text), _MOST_LOOKED_AT, True
    deadline = time.thread_time() + _MOST_SECONDS
    beside = _beside(text)
    if _kind(_error_of(beside)) == _kind(said):  # of what holds for all parts
        return _ROOT, said
    while found:
        found = False
        for step, inner in _parts(part):
            if budget <= 0 or time.thread_time() > deadline:
                break
            if inner is False:  # which forbids what it is of, and is right where that may be left out
                continue
            budget -= 1
            reference = {"$ref": f"#/{_WHOLE}{quote(where)}/{quote(step)}"}
            error = _error_of({**beside, "type": "array", "items": reference, "minItems": 1})
            if _kind(error) == _kind(said):
                where, part, said, found = f"{where}/{step}", inner, _WITHIN.sub("", error), True
                break
    return where or _ROOT, said


def _kind(said: str) -> str:
    """What an error is about. Why nothing is left of a schema is said otherwise of each part."""
    return said.partition(":")[0] if said.startswith("Unsatisfiable") else _WITHIN.sub("", said)


def _beside(text: str) -> dict[str, Any]:
    """A schema that holds another one as a whole and asks for nothing of it, so that all references lead where they
    did."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return {}
    own = next((schema[key] for key in _NAMES if isinstance(schema.get(key), str)), "").partition("#")[0]
    whole = json.loads(text, object_hook=lambda part: _redirected(part, own))
    for key in _NAMES:  # by which references would be resolved
        if isinstance(whole.get(key), str):
            del whole[key]
    return {key: schema[key] for key in ("$schema", OPTIONS_KEY) if key in schema} | {_WHOLE: whole}


def _redirected(part: dict[str, Any], own: str) -> dict[str, Any]:
    """A part of a schema, whose reference to the schema of name `own` is to where that lies now."""
    target = part.get("$ref")
    if isinstance(target, str):
        pointer = target.removeprefix(own)
        if pointer in ("", "#") or pointer.startswith("#/"):
            part["$ref"] = f"#/{_WHOLE}{pointer.removeprefix('#')}"
    return part


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas within a schema, each with the steps to it."""
    if not isinstance(schema, Mapping):
        return
    for name in _NAMED:
        inner = schema.get(name)
        for key, of_key in inner.items() if isinstance(inner, Mapping) else ():
            yield f"{name}/{_escaped(key)}", of_key
    for name in _LISTED:
        inner = schema.get(name)
        for place, of_place in enumerate(inner if isinstance(inner, list) else ()):
            yield f"{name}/{place}", of_place
    for name in _SINGLE:
        if name in schema and not isinstance(schema[name], list):
            yield name, schema[name]


def _escaped(key: str) -> str:
    """A key as a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _error_of(schema: Mapping[str, Any]) -> str:
    """The reason why a schema cannot be followed; empty if it can."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        is_wrong, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    except ValueError as error:
        is_wrong, said = True, [str(error)]
    return in_words(said[0]).replace(f"/{_WHOLE}", "") if is_wrong else ""
