"""What a request of the OpenAI API asks its text to be, under the names of several servers: one guide, or none.

What schemas and grammars mean is checked behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core.guide import JSON_OPTIONS
from trtrun.core.values import show_value
from trtrun.errors import nearest


class Asked(NamedTuple):
    """A guide that a request asks for.

    Attributes:
        field: that asks for it.
        name: of what is in it, for messages.
        kind: json, json_object, regex, choice or grammar.
        value: as it came.
        options: of JSON (`trtrun.core.guide.JSON_OPTIONS`), as they came, with the names that the request has for them.
    """

    field: str
    name: str
    kind: str
    value: object
    options: Mapping[str, tuple[str, object]] = {}

    def guided(self) -> dict[str, object]:
        """The guide, as SamplingParams has it."""
        return {self.kind: self.value} | {option: value for option, (_, value) in self.options.items()}

    def in_its_words(self, line: str) -> str:
        """What SamplingParams says of it, with the names that the request has."""
        line = line.replace(f"guided.{self.kind}", self.name, 1)
        for option, (name, _) in self.options.items():
            line = line.replace(f"guided.{option}", name, 1)
        return line


_PLAIN: Mapping[str, tuple[str, object]] = {
    "guided_json": ("json", None),
    "guided_regex": ("regex", None),
    "guided_choice": ("choice", None),
    "guided_grammar": ("grammar", None),
    "guided_json_object": ("json_object", False),
    "regex": ("regex", None),
    "ebnf": ("grammar", None),
    "grammar": ("grammar", ""),
    "json_schema": ("json", {}),
}
"""Fields that hold a guide as it is: its kind, and the value that asks for nothing."""

GUIDED_FIELDS = frozenset({"guided", "response_format", "structured_outputs", *_PLAIN})
"""All of them."""

_FORMATS = ("text", "json_object", "json_schema")
_OF_SCHEMA = ("name", "description", "schema", "strict")
_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar")
_OF_JSON = ("json", "json_object")
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
}


def read_guided(given: Mapping[str, Any]) -> Asked | None:
    """The guide of a body; None where nothing is asked for.

    Raises:
        Refusal: a field has another form, or two ask for something.
    """
    asked: list[Asked] = []
    for field in sorted(GUIDED_FIELDS & given.keys()):
        asked += _READERS.get(field, _read_plain)(field, given[field])
    if len(asked) > 1:
        line = f"{asked[0].name} and {asked[1].name} both say what the text must be: leave one of them out"
        raise _wrong(asked[1].field, line)
    if not asked:
        return None
    one = asked[0]
    if one.kind in _OF_JSON:
        return one._replace(options=_read_options(given))
    # Others send them with whatever they ask for; ours is wrong then, as it is elsewhere.
    return one._replace(options=_read_options({"guided": given["guided"]})) if one.field == "guided" else one


def _read_options(given: Mapping[str, Any]) -> dict[str, tuple[str, object]]:
    """Read the options of JSON, whichever field says that the text is JSON."""
    found: dict[str, tuple[str, object]] = {}
    if given.get("guided_whitespace_pattern") is not None:
        found["whitespace_pattern"] = "guided_whitespace_pattern", given["guided_whitespace_pattern"]
    for field in ("structured_outputs", "guided"):
        for option in JSON_OPTIONS:
            if (value := (given.get(field) or {}).get(option)) is not None:
                found[option] = f"{field}.{option}", value
    return found


def _read_plain(field: str, value: object) -> Iterator[Asked]:
    kind, nothing = _PLAIN[field]
    if value != nothing or type(value) is not type(nothing):
        yield Asked(field, field, kind, value)


def _read_own(field: str, value: object) -> Iterator[Asked]:
    of_kind = value if isinstance(value, Mapping) else {}
    kinds = [kind for kind, inner in of_kind.items() if inner is not None and kind not in JSON_OPTIONS]
    if len(kinds) != 1 or kinds[0] not in _STRUCTURED:
        raise _wrong(field, f"{field} must be an object with one of {', '.join(_STRUCTURED)}, not {show_value(value)}")
    yield Asked(field, f"{field}.{kinds[0]}", kinds[0], of_kind[kinds[0]])


def _read_format(field: str, value: object) -> Iterator[Asked]:
    if not isinstance(value, Mapping):
        raise _wrong(field, f'{field} must be an object such as {{"type": "json_object"}}, not {show_value(value)}')
    kind = value.get("type")
    if kind not in _FORMATS:
        raise _wrong(field, f"{field}.type must be text, json_object or json_schema, not {show_value(kind)}")
    _check_names(field, value, ("type", *([kind] if kind == "json_schema" else [])))
    if kind == "json_object":
        yield Asked(field, f"{field}.type", "json_object", True)
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, Mapping) or named.get("schema") is None:
            raise _wrong(field, f"{field}.json_schema must be an object with a schema, not {show_value(named)}")
        _check_names(f"{field}.json_schema", named, _OF_SCHEMA)
        yield Asked(field, f"{field}.json_schema.schema", "json", named["schema"])


def _read_structured(field: str, value: object) -> Iterator[Asked]:
    if not isinstance(value, Mapping):
        raise _wrong(field, f'{field} must be an object such as {{"json": {{…}}}}, not {show_value(value)}')
    _check_names(field, value, (*_STRUCTURED, *JSON_OPTIONS, *_HARMLESS))
    for name, inner in value.items():
        if name in _HARMLESS:
            if inner is not None and not any(inner is harmless for harmless in _HARMLESS[name]):
                raise _wrong(field, f"{field}.{name} is not supported here: leave it out")
        elif name not in JSON_OPTIONS and inner is not None and not (name == "json_object" and inner is False):
            yield Asked(field, f"{field}.{name}", name, inner)


_READERS: Mapping[str, Callable[[str, object], Iterator[Asked]]] = {
    "guided": _read_own,
    "response_format": _read_format,
    "structured_outputs": _read_structured,
}


def _check_names(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, inner in value.items():
        if name not in known and inner is not None:
            raise _wrong(field.split(".")[0], f"unknown field {show_value(name)} of {field}{nearest(name, known)}")


def _wrong(field: str, line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, field)
