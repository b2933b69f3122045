"""What the text of a request must be: JSON of a schema, a match of a regular expression, one of some texts, or a
sentence of a grammar.

Values as they come with requests become one kind and one text, which travels to the ranks. It knows JSON. It does not
know what a schema or a grammar means, tokens or models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trtrun.core.values import check_characters, check_words, read_flag, show_value, unique_keys
from trtrun.errors import InvalidRequestError, nearest, one_line

MOST_GUIDE_CHARACTERS = 1 << 17
"""Of one guide, as text."""


class Guide(NamedTuple):
    """What a text must be.

    Attributes:
        kind: json, regex, choice or grammar.
        text: the schema as JSON, the regular expression, a list of texts as JSON, or the grammar.
    """

    kind: str
    text: str


class GuideStart(NamedTuple):
    """What a row that is guided begins with: a guide, and the tokens that its text has already.

    Attributes:
        guide: what the text must be.
        output: tokens of a completion that goes on, as one that was preempted; none of a new one.
        is_alone: whether it is to share nothing with other rows of the guide, as those have used up what it needs.
    """

    guide: Guide
    output: tuple[int, ...] = ()
    is_alone: bool = False


def read_guide(name: str, value: object) -> Guide | None:
    """A guide of an object of one key, as `SamplingParams.guided` says, or of the pair that a Guide becomes in JSON.
    Beside JSON may stand what its blanks are (JSON_OPTIONS).

    Raises:
        InvalidRequestError: it is something else, or holds what cannot be a guide.
    """
    if value is None or isinstance(value, Guide):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        value = {value[0]: value[1]} if isinstance(value[0], str) else value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be an object such as {_EXAMPLE}, not {show_value(value)}")
    given = {kind: of_kind for kind, of_kind in value.items() if of_kind is not None}
    options = {key: given.pop(key) for key in JSON_OPTIONS if key in given}
    for kind in given:
        if kind not in _READERS:
            known = (*_READERS, *JSON_OPTIONS)
            raise InvalidRequestError(f"{name}: unknown kind {show_value(kind)}{nearest(str(kind), known)}")
    if len(given) != 1:
        said = " and ".join(sorted(given)) if given else "nothing"
        raise InvalidRequestError(f"{name} must have one of {', '.join(_READERS)}, and has {said}")
    ((kind, of_kind),) = given.items()
    guide = _READERS[kind](f"{name}.{kind}", of_kind)
    if options and guide is not None:
        guide = _with_options(name, guide, options)
    if guide is not None and len(guide.text) > MOST_GUIDE_CHARACTERS:
        raise InvalidRequestError(
            f"{name}.{kind} is {len(guide.text)} characters long; {MOST_GUIDE_CHARACTERS} are the most"
        )
    return guide


def _with_options(name: str, guide: Guide, options: Mapping[str, object]) -> Guide:
    """A JSON schema that allows other blanks between parts, as the grammar engine is told in a schema."""
    if guide.kind != "json":
        raise InvalidRequestError(f"{name}.{min(options)} is of JSON: leave it out with {guide.kind}")
    no_blanks = read_flag(f"{name}.disable_any_whitespace", options.get("disable_any_whitespace", False))
    pattern = options.get("whitespace_pattern")
    _check_blanks(f"{name}.whitespace_pattern", pattern)
    schema = json.loads(guide.text)
    if schema is False or not (no_blanks or pattern is not None):
        return guide
    schema = {} if schema is True else schema
    own = schema.get(OPTIONS_KEY, {})
    if not isinstance(own, dict):
        raise InvalidRequestError(f"{name}.{guide.kind}: {OPTIONS_KEY} must be an object, not {show_value(own)}")
    others = {key: value for key, value in own.items() if key not in ("whitespace_flexible", "whitespace_pattern")}
    blanks = {"whitespace_flexible": False} if no_blanks else {"whitespace_pattern": pattern}
    return Guide(guide.kind, _dump(f"{name}.{guide.kind}", schema | {OPTIONS_KEY: others | blanks}))


def _read_json(name: str, value: object) -> Guide:
    if isinstance(value, str):
        value = _parse(name, value)
    if not isinstance(value, Mapping | bool):
        raise InvalidRequestError(f"{name} must be a JSON schema, which is an object, not {show_value(value)}")
    if isinstance(value, Mapping):
        check_schema_options(name, value)
    return Guide("json", _dump(name, value))


def check_schema_options(name: str, schema: Mapping[str, object]) -> None:
    """Look at what a schema says at its root of what stands between the parts of JSON.

    Raises:
        InvalidRequestError: texts would be no JSON with it.
    """
    own = schema.get(OPTIONS_KEY)
    if not isinstance(own, Mapping):
        return  # the grammar engine says what is wrong
    _check_blanks(f"{name}: {OPTIONS_KEY}.whitespace_pattern", own.get("whitespace_pattern"))
    for key, mark in (("item_separator", ","), ("key_separator", ":")):
        separator = own.get(key)
        if separator is None or (isinstance(separator, str) and re.fullmatch(f"{_SPACED}{mark}{_SPACED}", separator)):
            continue
        line = f'must be "{mark}" with blanks, \\n, \\r and \\t beside it, not {show_value(separator)}'
        raise InvalidRequestError(f"{name}: {OPTIONS_KEY}.{key} {line}")


def _check_blanks(name: str, pattern: object) -> None:
    if pattern is not None and not (isinstance(pattern, str) and _OF_BLANKS.fullmatch(pattern)):
        raise InvalidRequestError(
            f"{name} must be a regular expression of blanks, \\n, \\r and \\t alone, such as "
            f'"[ \\n]{{0,8}}", not {show_value(pattern)}'
        )


def _read_json_object(name: str, value: object) -> Guide | None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, not {show_value(value)}")
    return Guide("json", '{"type":"object"}') if value else None


def _read_choice(name: str, value: object) -> Guide:
    if isinstance(value, str):
        value = _parse(name, value)
    if not isinstance(value, Sequence) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(f"{name} must be a list of texts, not {show_value(value)}")
    check_words(name, value)
    for text in value:
        check_characters(name, text)
    return Guide("choice", _dump(name, list(value)))


def _reader_of_text(kind: str) -> Callable[[str, object], Guide]:
    def read(name: str, value: object) -> Guide:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{name} must be a text that is not empty, not {show_value(value)}")
        check_characters(name, value)
        return Guide(kind, value)

    return read


_READERS: Mapping[str, Callable[[str, object], Guide | None]] = {
    "json": _read_json,
    "json_object": _read_json_object,
    "regex": _reader_of_text("regex"),
    "choice": _read_choice,
    "grammar": _reader_of_text("grammar"),
}
JSON_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
"""Beside `json` and `json_object`, as vLLM has them: no blanks between parts, or those of a regular expression."""

_BLANK = r"(?:[ \n\r\t]|\\[nrt]|\\x(?:20|0[9AaDd]))"
_OF_BLANKS = re.compile(rf"(?:{_BLANK}|\[{_BLANK}+\]|\(\?:|[()|?*+]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})*")
"""Regular expressions that match nothing but blanks: JSON would not be JSON with others."""

_SPACED = rf"(?:(?:{_BLANK}|\[{_BLANK}+\])[?*+]?)*"
"""Of a separator, what stands beside its character: no alternatives, which would leave it out."""

OPTIONS_KEY = "x-guidance"
"""Of a schema: how the grammar engine is to follow it; at its root alone."""

_EXAMPLE = '{"json": {"type": "object"}}'


def _parse(name: str, text: str) -> object:
    if len(text) > MOST_GUIDE_CHARACTERS:
        raise InvalidRequestError(f"{name} is {len(text)} characters long; {MOST_GUIDE_CHARACTERS} are the most")
    try:
        value: object = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {one_line(error)}") from None
    return value


def _dump(name: str, value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {one_line(error)}") from None
    check_characters(name, text)
    return text
