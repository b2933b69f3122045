"""Arguments that are written as text, each behind its name: what they are as JSON, and what schemas let be written."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_tokenizer
from family_texts import FORMS

from launch.serve.api.openai.output.grammar_parts import Lark, Wanted
from launch.serve.api.openai.output.grammars import write_grammar
from launch.serve.api.openai.output.machine import Arguments
from launch.serve.api.openai.output.parsing import ChoiceParser, Parsing
from launch.serve.api.openai.output.tagged_grammars import ParameterRules
from launch.serve.api.openai.output.tags import QWEN3_CODER
from launch.serve.api.openai.output.text_values import ALL_TYPES, as_json, types_of
from trtrun.chats.tools import Choice, read_tools
from trtrun.core.guide import Guide
from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Spelling, grammars_of
from trtrun.tokens.text import read_tokenizer

ROOT = {"$defs": {"kind": {"enum": ["a", "5"]}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"type": "string", "enum": ["a"]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, {"number", "null"}),
        ({"$ref": "#/$defs/kind"}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/kind"}, {"$ref": "#/$defs/a~1b"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "elsewhere"}, ALL_TYPES),
        ({}, ALL_TYPES),
        (None, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_are_what_a_schema_says(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_alternatives_that_many_name_are_looked_at_once() -> None:
    """Each of ten, of which each may be any of the next ten; and one that is ten times itself."""
    defs: dict[str, Any] = {f"a{place}": {"anyOf": [{"$ref": f"#/$defs/a{place + 1}"}] * 10} for place in range(7)}
    defs |= {"a7": {"type": ["string", "null"]}, "self": {"anyOf": [{"$ref": "#/$defs/self"}] * 10}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": defs}
    assert types_of({"$ref": "#/$defs/self"}, schema) == ALL_TYPES
    assert types_of({"$ref": "#/$defs/a0"}, schema) == {"string", "null"}
    [tool] = read_tools({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}).tools
    lark = Lark({})
    ParameterRules(lark, QWEN3_CODER).of_tool(tool)
    assert lark.size < 200


def test_a_grammar_ends_where_it_is_too_long() -> None:
    """Each parameter has a rule with all that the schema defines: a short request would be gigabytes."""
    properties = {f"p{number}": {"type": "array", "items": {"$ref": "#/$defs/a"}} for number in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"a": {"enum": ["a" * 10_000]}}}
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="tools: what guides the answer is longer than 131072 characters"):
        grammar_of(schema)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5", {"string", "null"}, "5"),
        ("5", ALL_TYPES, 5),
        ("None", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("False", {"boolean"}, False),
        ("True", ALL_TYPES, True),
        ('"quoted"', ALL_TYPES, '"quoted"'),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ('{"a": [1]}', {"string", "object"}, {"a": [1]}),
        ('{"a": [1]}', {"string"}, '{"a": [1]}'),
        ("{a: 1}", {"object"}, "{a: 1}"),
        ("NaN", {"number"}, "NaN"),
        ("three", {"integer"}, "three"),
        (" 3\n", {"integer"}, 3),
        ('é\n"', {"string"}, 'é\n"'),
    ],
)
def test_a_value_is_json_of_its_type(text: str, types: set[str], value: object) -> None:
    told = json.loads(as_json(text, frozenset(types)))
    assert told == value and type(told) is type(value)


@pytest.fixture(scope="module")
def allows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], bool]:
    """Whether a text is a whole sentence of a grammar."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    tokens = grammars_of(Spelling.of(tokenizer, tokenizer.vocab_size, (0,)).read())

    def answer(grammar: str, text: str) -> bool:
        tokens.check(Guide("grammar", grammar))
        matcher, ids = tokens.matcher(Guide("grammar", grammar)), tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return answer


def grammar_of(parameters: dict[str, Any], is_strict: bool = True, form: str = "qwen3_coder") -> str:
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    use = read_tools({"tools": [{"type": "function", "function": function}]})
    assert use is not None and use.choice is Choice.AUTO
    return write_grammar(form, "", False, Wanted(use.callable, must_call=True), {})


def call(**values: str) -> str:
    told = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{told}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\nb <c>\n", "</param"], ["a</parameter>b"]),
        ({"type": "string", "format": "date", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-z]+/$"}, ["ab/"], ["a/b", "xAb/"]),
        ({"type": "string", "pattern": "b|c"}, ["abd", "c"], ["ad"]),
        ({"type": "string", "pattern": r"^a|b\Z"}, ["ax", "xb"], ["xa", "bx"]),
        (
            {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}]},
            ["1."],
            ["-."],
        ),
        ({"enum": ["a", "5", None]}, ["a", "5", "null"], ["b", ""]),
        ({"$ref": "#/$defs/kind"}, ["a", "5"], ["b"]),
        ({"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]}, ["a", "null"], ["b"]),
        ({"type": "integer", "minimum": 1}, ["5"], ["0", "x", "1.5"]),
        ({"type": "array", "items": {"$ref": "#/$defs/kind"}}, ['["a"]', "[]"], ['["b"]', "a"]),
        ({"type": "boolean"}, ["true"], ["yes"]),
    ],
)
def test_values_are_what_their_schemas_allow_and_are_read_so(
    allows: Callable[[str, str], bool], schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], **ROOT}
    types = types_of(schema, ROOT)
    for form, calls in WRITTEN.items():
        grammar = grammar_of(parameters, form=form)
        for text in right:
            allowed = {kind: called for kind, called in calls(text).items() if allows(grammar, called)}
            assert allowed, (form, text)
            for is_text, called in allowed.items():
                told = read(form, called, parameters)
                is_string = is_text and "string" in types
                assert told == {"a": text if is_string else json.loads(as_json(text, types))}, (form, text)
        for text in wrong:
            end = "</parameter>" if form == "qwen3_coder" else FORMS[form].end_argument.strip()
            for called in calls(text.replace("</parameter>", end)).values():
                assert not allows(grammar, called), (form, text)
    assert not allows(grammar_of(parameters), call())


def of_form(name: str) -> Callable[[str], dict[bool | None, str]]:
    """Calls with a value: one, or where the form tells texts from others, one of each kind."""
    form, kinds = FORMS[name], (True, False) if name == "deepseek_v32" else (None,)
    return lambda text: {kind: form.calls(form.one("f", form.argument("a", text, bool(kind)))) for kind in kinds}


WRITTEN: dict[str, Callable[[str], dict[bool | None, str]]] = {
    "qwen3_coder": lambda text: {None: call(a=text)},
    **{name: of_form(name) for name in ("glm45", "glm47", "minimax_m2", "deepseek_v32")},
}


def read(form: str, called: str, parameters: dict[str, Any]) -> object:
    """The arguments of a call."""
    events = ChoiceParser(Parsing(form, schemas={"f": json.dumps(parameters)})).feed(called, True)
    return json.loads("".join(event.text for event in events if isinstance(event, Arguments)))


def test_a_kind_that_a_parameter_says_is_that_of_its_value(allows: Callable[[str, str], bool]) -> None:
    """In DeepSeek V3.2's form, where a value may be a text or another one."""
    schema = {"type": ["string", "integer"]}
    grammar = grammar_of({"type": "object", "properties": {"a": schema}, "required": ["a"]}, form="deepseek_v32")
    calls = WRITTEN["deepseek_v32"]
    for text, kinds in (("5", {True, False}), ("x", {True}), ("true", {True})):
        assert {kind for kind, called in calls(text).items() if allows(grammar, called)} == kinds, text


def test_parameters_are_in_order_and_those_that_are_not_required_may_be_left_out(
    allows: Callable[[str, str], bool],
) -> None:
    of = {"type": "string"}
    grammar = grammar_of({"type": "object", "properties": {"a": of, "b": of, "c": of}, "required": ["b"]})
    for right in (call(b="x"), call(a="x", b="y"), call(a="x", b="y", c="z")):
        assert allows(grammar, right)
    for wrong in (call(a="x"), call(b="x", a="y"), call(b="x", d="y"), call(b="x", c="y").replace("</function>\n", "")):
        assert not allows(grammar, wrong)


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"anyOf": [{"type": "object"}]}, "tools\\[0\\].function.parameters has anyOf at its root: .* be held to that"),
        ({"properties": {"a": {}}, "required": ["b"]}, "requires 'b', which is not among its properties"),
        ({"properties": {"a": {}}, "required": -1}, r"parameters\.required must be a list of names, not -1"),
        ({"properties": {"a": {}}, "required": [["a"]]}, r"parameters\.required must be a list of names"),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/a"}]}}},
            r"properties\.a has anyOf within anyOf, 8 deep or within itself",
        ),
        ({"properties": {"a b": {}}}, "has a name with blanks or brackets, 'a b'"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "parameters.properties.a has not"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "properties.a has a value with </parameter>"),
        ({"properties": {"a": {"type": ["string", "null"], "maxLength": 2}}}, "a text among others"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_place(parameters: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidRequestError, match=line):
        grammar_of(parameters)


def test_what_cannot_be_followed_is_left_out_of_tools_that_are_not_strict(allows: Callable[[str, str], bool]) -> None:
    a: dict[str, Any] = {"type": ["string", "null"], "maxLength": 2}
    b = {"type": "string", "not": {"const": "x"}}
    parameters = {"properties": {"a": a, "b": b}, "required": ["b", "c"], "anyOf": [{"type": "object"}]}
    grammar = grammar_of(parameters, is_strict=False)
    assert allows(grammar, call(a="long", b="x")) and not allows(grammar, call(a="long"))
