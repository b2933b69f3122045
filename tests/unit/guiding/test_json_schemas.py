"""Texts that the grammar engine would allow, and that are not of the schema."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import jsonschema
import pytest
from guided_rows import guide_of

from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.json_schemas import closed
from trtrun.tokens.text import Tokenizer

DAY = {"type": "string", "format": "date"}
MOMENT = {"type": "string", "format": "date-time"}


def is_allowed(grammars: Grammars, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    matcher = grammars.matcher(guide_of({"json": schema}))
    return all(map(matcher.consume_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (DAY, '"2023-02-29"', False),
        (DAY, '"1900-02-29"', False),
        (DAY, '"2000-02-29"', True),
        (DAY, '"2024-02-29"', True),
        (MOMENT, '"2023-02-29T00:00:00Z"', False),
        (MOMENT, '"2024-02-29T00:00:00Z"', True),
        ({"format": "date"}, "5", True),
        ({**DAY, "pattern": "^20", "allOf": [{"maxLength": 10}]}, '"2004-02-29"', True),
        ({**DAY, "pattern": "^20", "allOf": [{"maxLength": 10}]}, '"1904-02-29"', False),
        ({"enum": [{"format": "date"}]}, '{"format":"date"}', True),
        ({"properties": {"enum": DAY, "format": DAY}}, '{"enum":"2024-02-29","format":"2024-02-29"}', True),
        ({"properties": {"enum": DAY, "format": DAY}}, '{"enum":"2023-02-29"}', False),
        ({"anyOf": [{"$ref": "#/x/y"}, {"type": "null"}], "x": {"y": DAY}}, '"2023-02-29"', False),
        ({"properties": {"a": {"const": 1}}}, r'{"\u0061":2}', False),
        ({"properties": {"a": {"const": 1}}}, r'{"a":1,"\n\"\\é":2}', True),
        ({"properties": {"\x01": {"const": 1}}}, r'{"\u0001":1}', True),
        ({"pattern": r"^\x7f$", "enum": ["\x7f"]}, r'"\u007f"', True),
        ({"type": "string", "format": "starts_with", "pattern": "^ab"}, '"abc"', True),
        ({"type": "string", "format": "starts_with", "pattern": "^ab"}, '"cab"', False),
        ({"properties": {"format": {"format": "path"}}, "enum": [{"format": "path"}]}, '{"format":"path"}', True),
        ({"x-guidance": {"json_allowed_escapes": "u"}, "properties": {"a": {"const": 1}}}, r'{"\u0061":2}', True),
    ],
)
def test_what_is_not_of_the_schema_is_not_allowed(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, text: str, expected: bool
) -> None:
    assert is_allowed(grammars, tokenizer, schema, text) == expected


DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
PLACES = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"}
PASSWORD = {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[\w]{4,}\Z"}
NAMED: dict[str, Any] = {"type": "object", "propertyNames": {"$ref": "#/$defs/e"}, "$defs": {"e": {"enum": ["a", "b"]}}}
BY_PATTERN = {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}}
BY_LENGTH = {"propertyNames": {"minLength": 2, "maxLength": 3}, "properties": {"ab": DAY, "a": {}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (DECIMAL, ["1", "-1.5", ".5", "+0", "007."], ["", "-", ".", "+.", "1.2.3", "1a", "--1"]),
        (PLACES, ["1", "1.25", "1.2500"], ["1.255", "."]),
        (PASSWORD, ["aB1c"], ["ab1c", "aBcd", "aB1", "aB1c!"]),
        ({"type": "string", "pattern": r"^(?!\s+$)[ a]*$"}, ["", "a", " a"], [" ", "  "]),
        (NAMED, [{}, {"a": 1}, {"a": 1, "b": "x"}], [{"c": 1}]),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
        ({**NAMED, "additionalProperties": False}, [{}], [{"a": 1}]),
        ({**NAMED, "properties": {"a": DAY, "c": {}}}, [{"a": "2024-02-29", "b": 1}], [{"a": "x"}, {"c": 1}]),
        (BY_PATTERN, [{"abc": 1}, {}], [{"abd": 1}, {"abc": "x"}]),
        (BY_LENGTH, [{"ab": "2024-02-29", "abc": 1}], [{"a": 1}, {"abcd": 1}, {"ab": "x"}]),
        ({"propertyNames": {"type": "string"}, "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"items": {"propertyNames": {"const": "x"}}}, [[{"x": 1}]], [[{"y": 1}]]),
    ],
)
def test_what_is_said_in_other_words_is_the_same(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    """To jsonschema as to the engine."""
    for value in [*right, *wrong]:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_valid == (value in right) or "format" in json.dumps(schema), value
        assert is_allowed(grammars, tokenizer, schema, json.dumps(value)) == (value in right), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a(?=b)"}, "look"),
        ({"type": "string", "pattern": "^(?!ab)c"}, "look"),
        ({"type": "string", "pattern": "^(?=a)b|c"}, "look"),
        ({"propertyNames": {"pattern": "^(?=a)..$"}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "propertyNames"),
        ({"propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        (
            {"propertyNames": {"enum": [f"{n:04}" for n in range(2000)]}, "additionalProperties": {"enum": ["x" * 99]}},
            "propertyNames",
        ),
    ],
)
def test_what_cannot_be_said_in_other_words_is_refused(grammars: Grammars, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.check(guide_of({"json": schema}))


INDENTED = json.dumps({"a": [{"b": {"c": [[1, 2], {}]}}]}, indent=4)
OPEN = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ \n]+"}}


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INDENTED, True),
        ('{ "a" :1 ,"b":\r\n\t\t[ ] }', True),
        ('{"a": \n' + 32 * " " + "1 \n}", True),
        ('{"a": \n' + 33 * " " + "1}", False),
        ('{"a":\n\n1}', False),
    ],
)
def test_blanks_of_json_are_bounded(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, text: str, expected: bool
) -> None:
    assert is_allowed(grammars, tokenizer, schema, text) == expected
    assert schema is True or is_allowed(grammars, tokenizer, schema | OPEN, text.replace("\r", "").replace("\t", ""))


def test_patterns_of_names_stay_within_bounds(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "patternProperties": {"[A-Za-z0-9-_.:]{1,255}": {"type": "integer"}}}
    assert is_allowed(grammars, tokenizer, schema, '{"child1":1}')


def test_each_day_that_there_is_is_a_date(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for day in range(date(2023, 1, 1).toordinal(), date(2025, 1, 1).toordinal()):
        assert is_allowed(grammars, tokenizer, DAY, json.dumps(date.fromordinal(day).isoformat()))


def test_properties_keep_their_order() -> None:
    schema = {"properties": {name: DAY for name in "zay"}, "required": ["y", "z"]}
    read = json.loads(closed(json.dumps(schema)))
    assert [*read["properties"]] == ["z", "a", "y"] and closed("false") == "false"
