"""Grammars of what a model must write: which texts they allow, where marks are special tokens and where they are text;
and that parsers find in them what they were asked for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import MARKS
from checkpoints import make_tokenizer
from family_texts import BEGIN, END, kimi_call
from family_texts import FORMS as TAGGED

from launch.serve.api.openai.output.formats import REASONING_FORMATS, TOOL_FORMATS
from launch.serve.api.openai.output.grammar_parts import Wanted, without_notes
from launch.serve.api.openai.output.grammars import as_lark, write_grammar
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Reasoning
from launch.serve.api.openai.output.parsing import ChoiceParser, Parsing
from trtrun.api.prompts import PromptReader
from trtrun.chats.tools import read_tools
from trtrun.core.guide import Guide
from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Spelling, grammars_of
from trtrun.tokens.text import Tokenizer, read_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ARGUMENTS, WRONG = '{"a": 1}', '{"a": "x"}'
F, G = f'{{"name": "f", "arguments": {ARGUMENTS}}}', '{"name": "g", "arguments": {"free": 1}}'
LLAMA_F, LLAMA_G = F.replace("arguments", "parameters"), G.replace("arguments", "parameters")
HERMES_F, HERMES_G = f"<tool_call>\n{F}\n</tool_call>", f"<tool_call>\n{G}\n</tool_call>"
CODER_F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CODER_G = "<tool_call>\n<function=g>\n<parameter=free>\n1\n</parameter>\n</function>\n</tool_call>"
CODER_FREE = CODER_G.replace("</f", "<parameter=some>\nwords <b>\n\n</parameter>\n</f")
V3_F = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
V3_G = V3_F.replace("sep｜>f", "sep｜>g").replace(ARGUMENTS, '{"free": 1}')
V31_F = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
V31_G = V31_F.replace(">f<", ">g<").replace(ARGUMENTS, '{"free": 1}')
ALL, END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI_F, KIMI_G = kimi_call("functions.f:0", ARGUMENTS), kimi_call("functions.g:12", '{"free": 1}')
GEMMA_F, GEMMA_G = f"<|tool_call>call:f{ARGUMENTS}<tool_call|>", '<|tool_call>call:g{"free": 1}<tool_call|>'
HEAD, CALL = "<|channel|>", " <|constrain|>json<|message|>"
HARMONY_F = f"{HEAD}commentary to=functions.f{CALL}{ARGUMENTS}"
HARMONY_G = f'{HEAD}commentary to=functions.g{CALL}{{"free": 1}}'
COMMENTARY = f"{HEAD}commentary<|message|>I ask.<|end|><|start|>assistant"
ANALYSIS = f"{HEAD}analysis<|message|>so<|end|><|start|>assistant"


@pytest.fixture(scope="module", params=["special", "added", "text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Marks are special tokens, such as Llama's; tokens that are added, and text, such as Qwen's; or no tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(
        folder,
        special=()
        if request.param == "text"
        else tuple(dict.fromkeys([*MARKS, *(mark for form in TOOL_FORMATS.values() for mark in form.marks)])),
    )
    if request.param == "added":
        file = folder / "tokenizer.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        for token in values["added_tokens"][1:]:
            token["special"] = False
        file.write_text(json.dumps(values), encoding="utf-8")
    found = read_tokenizer(folder)
    assert found is not None
    return found


def allows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a text is a whole sentence of a grammar."""
    tokens = grammars_of(Spelling.of(tokenizer, tokenizer.vocab_size, (0,)).read())
    tokens.check(Guide("grammar", grammar))
    matcher = tokens.matcher(Guide("grammar", grammar))
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def wanted(choice: str = "auto", in_parallel: bool = True, **others: Any) -> Wanted:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ]
    use = read_tools({"tools": tools, "tool_choice": choice})
    assert use is not None
    return Wanted(use.callable, choice == "required", in_parallel, **others)


def write(tokenizer: Tokenizer, tools: str, reasoning: str, is_thinking: bool, asked: Wanted) -> str:
    reader = PromptReader(SimpleNamespace(vocab_size=tokenizer.vocab_size, eos_token_ids=(0,)), tokenizer)
    marks = [*TOOL_FORMATS[tools].marks, *(REASONING_FORMATS[reasoning].marks if reasoning else ())]
    return write_grammar(tools, reasoning, is_thinking, asked, reader.ids_in_guides(marks))


# The form; texts that are calls and nothing else; texts with no call or one beside text; and texts that are neither.
FORMS: list[tuple[str, list[str], list[str], list[str]]] = [
    ("hermes", [HERMES_F, f"{HERMES_F}\n{HERMES_G}"], ["", "text", f"text\n{HERMES_F}", f"{HERMES_F} text {HERMES_G}"],
     [HERMES_F.replace(ARGUMENTS, WRONG), "<tool_call>", f"<tool_call>{F}", HERMES_F.replace('"f"', '"h"')]),
    ("qwen3_coder", [CODER_F, f"{CODER_F}\n{CODER_G}", CODER_FREE], ["", "text", f"text\n{CODER_F}"],
     [CODER_F.replace("\n1\n", "\nx\n"), "<tool_call>", CODER_F.replace("=a", "=b"), CODER_F.replace("=f", "=h"),
      CODER_F.removeprefix("<tool_call>\n"), f"<function=f>\n</function>\n{CODER_F}",
      CODER_F.replace("<parameter=a>\n1\n</parameter>\n", "")]),
    ("llama3_json", [LLAMA_F, f"{LLAMA_F}; {LLAMA_G}"], ["", "text", f" {LLAMA_F}", "a {b}"],
     [LLAMA_F.replace(ARGUMENTS, WRONG), "{", f"{LLAMA_F} text", '{"name": "h"}']),
    ("mistral", [f"[TOOL_CALLS][{F}]", f"[TOOL_CALLS] [{F}, {G}]"], ["", "text [1]", f"text [TOOL_CALLS][{F}]"],
     [f"[TOOL_CALLS][{F.replace(ARGUMENTS, WRONG)}]", "[TOOL_CALLS]", f"[TOOL_CALLS][{F}] text"]),
    ("llama_nemotron_json", [f"<TOOLCALL>[{F}]</TOOLCALL>", f"<TOOLCALL>[{F}, {G}]</TOOLCALL>"],
     ["", "text [1]", f"text <TOOLCALL>[{F}]</TOOLCALL>"],
     [f"<TOOLCALL>[{F.replace(ARGUMENTS, WRONG)}]</TOOLCALL>", "<TOOLCALL>", f"<TOOLCALL>[{F}]"]),
    ("deepseek_v3", [f"{ALL}{V3_F}{END_ALL}", f"{ALL}{V3_F}\n{V3_G}{END_ALL}"],
     ["", "text", f"text{ALL}{V3_F}{END_ALL}"],
     [f"{ALL}{V3_F.replace(ARGUMENTS, WRONG)}{END_ALL}", ALL, V3_F, f"{ALL}{V31_F}{END_ALL}", f"{ALL}{V3_F}",
      f"{ALL}{V3_F.replace('>f', '>h')}{END_ALL}"]),
    ("deepseek_v31", [f"{ALL}{V31_F}{END_ALL}", f"{ALL}{V31_F}{V31_G}{END_ALL}"],
     ["", "text", f"text{ALL}{V31_F}{END_ALL}"],
     [f"{ALL}{V31_F.replace(ARGUMENTS, WRONG)}{END_ALL}", ALL, V31_F, f"{ALL}{V3_F}{END_ALL}"]),
    ("kimi_k2", [f"{BEGIN}{KIMI_F}{END}", f"{BEGIN}{KIMI_F}{KIMI_G}{END}"], ["", "text", f"text{BEGIN}{KIMI_F}{END}"],
     [f"{BEGIN}{KIMI_F.replace(ARGUMENTS, WRONG)}{END}", BEGIN, KIMI_F, f"{BEGIN}{KIMI_F}",
      f"{BEGIN}{KIMI_F.replace(':0', '')}{END}", f"{BEGIN}{KIMI_F.replace('.f', '.h')}{END}"]),
    ("gemma4", [GEMMA_F, f"{GEMMA_F}{GEMMA_G}"], ["", "text", f"text {GEMMA_F}", f"{GEMMA_F} text {GEMMA_G}"],
     [GEMMA_F.replace(ARGUMENTS, WRONG), "<|tool_call>", GEMMA_F.replace(":f", ":h"), GEMMA_F.replace("<tool_", "<")]),
    ("json", [f"[{LLAMA_F}]", f"[{LLAMA_F}, {LLAMA_G}]"], ["", "text [1]", ARGUMENTS],
     ["[]", f"[{LLAMA_F}", f"[{LLAMA_F}] text", f"[{LLAMA_F.replace(ARGUMENTS, WRONG)}]"]),
    ("gpt-oss", [HARMONY_F, ANALYSIS + HARMONY_F, f"{COMMENTARY}{HARMONY_G}"],
     [f"{HEAD}final<|message|>text", f"{ANALYSIS}{HEAD}final<|message|>"],
     [HARMONY_F.replace(ARGUMENTS, WRONG), "text", f"{HEAD}analysis<|message|>so", HARMONY_F.replace("s.f", "s.h")]),
]  # fmt: skip


def tagged(name: str) -> tuple[str, list[str], list[str], list[str]]:
    """The same of a form whose arguments are texts between marks."""
    form = TAGGED[name]
    between = "" if form.opening else form.argument("", "", True)[-1:].replace(">", "")
    f, g = form.one("f", form.argument("a", "1", False)), form.one("g", form.argument("free", " <b>\n\n", True))
    one, two = form.calls(f), f"{form.opening}{f}{between}{g}{form.closing}"
    wrong = [
        form.calls(form.one("f", form.argument("a", "x", False))),
        form.calls(form.one("f", form.argument("b", "1", False))),
        form.calls(form.one("h", form.argument("a", "1", False))),
        form.calls(form.one("f")),
        form.opening or "<tool_call>",
        one[:-5],
    ]
    if form.opening:
        wrong += [f, f"{form.one('g')}{one}"]
    return name, [one, two, form.calls(form.one("g"))], ["", "text < ", f"text\n{one}", f"text{two} text"], wrong


FORMS += [tagged(name) for name in TAGGED]


@pytest.mark.parametrize("form", [form for form, *_ in FORMS])
def test_as_many_tools_may_be_offered_as_openai_takes(tokenizer: Tokenizer, form: str) -> None:
    offered = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(128)
    ]
    use = read_tools({"tools": offered, "tool_choice": "required"})
    assert use is not None
    must = write(tokenizer, form, "", False, Wanted(use.callable, True, True))
    assert not allows(tokenizer, must, "text")  # and is no grammar that is refused


@pytest.mark.parametrize(("form", "calls", "free", "wrong"), FORMS, ids=[form for form, *_ in FORMS])
def test_what_may_be_written_in_a_form(
    tokenizer: Tokenizer, form: str, calls: list[str], free: list[str], wrong: list[str]
) -> None:
    must = write(tokenizer, form, "", False, wanted("required"))
    for text in calls:
        assert allows(tokenizer, must, text), text
    for text in [*free, *wrong]:
        assert not allows(tokenizer, must, text) or text in (f" {LLAMA_F}",), text
    one = write(tokenizer, form, "", False, wanted("required", in_parallel=False))
    assert allows(tokenizer, one, calls[0])
    assert form == "gpt-oss" or not allows(tokenizer, one, calls[1])
    may = write(tokenizer, form, "", False, wanted())
    for text in [*calls, *free]:
        assert allows(tokenizer, may, text), text
    for text in wrong:
        assert not allows(tokenizer, may, text), text
    # What is allowed is found.
    for text in [*calls, *free]:
        schemas = {"f": json.dumps(SCHEMA), "g": "{}"}
        events = ChoiceParser(Parsing(form, names=("f", "g"), schemas=schemas)).feed(text, True)
        assert [event.name for event in events if isinstance(event, CallBegin)] == [
            name
            for name in ("f", "g")
            if any(mark in text for mark in (f'"{name}"', f"functions.{name}", f"<function={name}>", f"｜>{name}"))
            or re.search(rf"<tool_call>{name}[\n<]|call:{name}{{", text)
        ]
        assert all(type(json.loads(event.text)) is dict for event in events if isinstance(event, Arguments))


def test_mistrals_newer_form(tokenizer: Tokenizer) -> None:
    asked = wanted("required", has_arguments_in_brackets=True)
    grammar = write(tokenizer, "mistral", "", False, asked)
    text = f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"
    assert allows(tokenizer, grammar, text) and allows(tokenizer, grammar, f"{text}[TOOL_CALLS]g[ARGS]{{}}")
    assert allows(tokenizer, grammar, text.replace("[ARGS]", "[CALL_ID]abcDEF123[ARGS]"))
    assert not allows(tokenizer, grammar, text.replace(ARGUMENTS, WRONG))
    assert not allows(tokenizer, grammar, f"[TOOL_CALLS][{F}]")


@pytest.mark.parametrize("is_thinking", [True, False])
def test_thoughts_come_first(tokenizer: Tokenizer, is_thinking: bool) -> None:
    grammar = write(tokenizer, "hermes", "qwen3", is_thinking, wanted("required"))
    thoughts = "so it is\n</think>\n\n" if is_thinking else "<think>so</think>"
    assert allows(tokenizer, grammar, thoughts + HERMES_F)
    assert allows(tokenizer, grammar, HERMES_F)  # which ends thoughts that were not ended
    assert not allows(tokenizer, grammar, thoughts)
    for guide, text in (
        (Guide("json", '{"const":1}'), "1"),
        (Guide("regex", "a/b\\/\\n+"), "a/b/\n\n"),
        (Guide("choice", '["x\\"y","z"]'), 'x"y'),
    ):
        other = as_lark(guide)
        assert other is not None
        grammar = write(tokenizer, "hermes", "qwen3", is_thinking, Wanted(other=other))
        assert allows(tokenizer, grammar, thoughts + text) and not allows(tokenizer, grammar, thoughts + HERMES_F)
        grammar = write(tokenizer, "hermes", "qwen3", is_thinking, wanted(other=other))
        assert allows(tokenizer, grammar, thoughts + text) and allows(tokenizer, grammar, thoughts + HERMES_F)
        grammar = write(tokenizer, "gpt-oss", "gpt-oss", False, Wanted(other=other))
        assert allows(tokenizer, grammar, f"{ANALYSIS}{HEAD}final<|message|>{text}")
    assert as_lark(Guide("grammar", "start: A")) is None


# Forms with marks: a whole call, and thoughts that go with them.
CUT = [
    ("hermes", HERMES_F, "qwen3"),
    ("qwen3_coder", CODER_F, "qwen3"),
    ("deepseek_v3", f"{ALL}{V3_F}{END_ALL}", "deepseek_r1"),
    ("deepseek_v31", f"{ALL}{V31_F}{END_ALL}", "deepseek_r1"),
    ("mistral", f"[TOOL_CALLS][{F}]", "mistral"),
    ("llama_nemotron_json", f"<TOOLCALL>[{F}]</TOOLCALL>", "qwen3"),
    ("llama3_json", f"<|python_tag|>{LLAMA_F}", "qwen3"),
    ("kimi_k2", f"{BEGIN}{KIMI_F}{END}", "qwen3"),
    *((name, calls[0], "qwen3") for name, calls, *_ in FORMS if name in TAGGED),
]


@pytest.mark.parametrize(("form", "call", "reasoning"), CUT, ids=[form for form, *_ in CUT])
def test_a_call_ends_thoughts_that_are_not_ended(tokenizer: Tokenizer, form: str, call: str, reasoning: str) -> None:
    marks, other = REASONING_FORMATS[reasoning], as_lark(Guide("json", '{"const":1}'))
    wrong = call.replace(ARGUMENTS, WRONG).replace("\n1\n", "\nx\n").replace(">1<", ">x<")
    for asked in (wanted("required"), wanted(), wanted(other=other), wanted("required", in_parallel=False)):
        for is_thinking in (True, False):
            grammar = write(tokenizer, form, reasoning, is_thinking, asked)
            begin = "" if is_thinking else marks.open_mark
            whole = f"{begin}so it is{marks.close_mark}\n\n"
            assert allows(tokenizer, grammar, f"{begin}so it is\n{call}"), (asked, is_thinking)
            assert allows(tokenizer, grammar, whole + call.removeprefix("<|python_tag|>")), (asked, is_thinking)
            assert not allows(tokenizer, grammar, f"{begin}so it is\n{wrong}")
            assert allows(tokenizer, grammar, f"{whole}text") == (not asked.must_call and asked.other is None)
            assert allows(tokenizer, grammar, f"{whole}1") == (not asked.must_call)
            if form in TAGGED and TAGGED[form].opening:  # within which all calls are
                assert not asked.must_call or not allows(tokenizer, grammar, f"{begin}so it is\n{call}{call}")
            # What is allowed is found.
            parsing = Parsing(form, reasoning, is_thinking, ("f", "g"))
            found = ChoiceParser(parsing).feed(f"{begin}so it is\n{call}", True)
            assert [type(event) for event in found] == [Reasoning, CallBegin, Arguments]


def test_a_text_holds_nothing_that_is_read_as_the_next_parameter(tokenizer: Tokenizer) -> None:
    named = {name: {"type": "string", "maxLength": 90} for name in ("a", "b")}
    schema = {"type": "object", "properties": named, "required": ["a"]}
    function = {"name": "f", "parameters": schema, "strict": True}
    use = read_tools({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
    assert use is not None
    grammar = write(tokenizer, "qwen3_coder", "", False, Wanted(use.callable, must_call=True))
    for text in ("x\n<parameter=c>\ny", "x <parameter=b> y", "x\n<parameter=b>\ny"):
        is_read = text.startswith("x\n<parameter=b")
        assert allows(tokenizer, grammar, CODER_F.replace("\n1\n", f"\n{text}\n")) == (not is_read), text
    for name, form in TAGGED.items():
        grammar = write(tokenizer, name, "", False, Wanted(use.callable, must_call=True))
        next_one = form.argument("b", "|", True).split("|")[0]
        for text, is_right in (("x </ <b>\n", True), ("x" * 91, False), (f"x\n{next_one}y", False)):
            call = form.calls(form.one("f", form.argument("a", text, True)))
            assert allows(tokenizer, grammar, call) == is_right, (name, text)


def test_rules_of_parameters_are_put_down_once(tokenizer: Tokenizer) -> None:
    """Whether a call stands in front of text, behind thoughts or in their midst."""
    assert write(tokenizer, "qwen3_coder", "qwen3", False, wanted()).count("<parameter=a>") == 1


def test_the_head_of_a_call_ends_thoughts_of_gpt_oss(tokenizer: Tokenizer) -> None:
    begin = f"{HEAD}analysis<|message|>so"
    for choice in ("required", "auto"):
        grammar = write(tokenizer, "gpt-oss", "gpt-oss", False, wanted(choice))
        assert allows(tokenizer, grammar, begin + HARMONY_F)
        for wrong in (HARMONY_F.replace(ARGUMENTS, WRONG), f"{HEAD}final<|message|>x"):
            assert not allows(tokenizer, grammar, begin + wrong)


def test_an_object_that_begins_as_a_call_does_may_be_written_beside_it(tokenizer: Tokenizer) -> None:
    references = {"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["a", "b"]}}}
    for schema, text, wrong in (
        ({"properties": {"name": {"type": "string"}, "x": {"type": "integer"}}}, '{"name": "f", "x": 1}', "1."),
        ({"type": "object", "properties": {"name": {"enum": ["g", "other"]}}}, '{"name":"other"}', '{"name":"h"}'),
        ({"type": "object"}, '{"nam": 5}', "5"),
        ({"const": {"a": 1}}, '{"a":1}', '{"a":2}'),
        (references, '"b"', '"c"'),
        ({"$id": "https://x.org/y", **references}, '"b"', '"c"'),
        ({"properties": {"const": references["$defs"]["x"]}}, '{"const":"a"}', '{"const":"c"}'),
        (
            {"properties": {"const": {"$ref": "#/$defs/x"}}, "required": ["const"], "$defs": references["$defs"]},
            '{"const":"a"}',
            '{"const":"c"}',
        ),
    ):
        other = as_lark(Guide("json", json.dumps(schema)))
        asked = replace(wanted(other=other), other_schema=schema)
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": references["$defs"]}
        tool = replace(asked.tools[0], parameters=parameters)
        grammar = write(tokenizer, "llama3_json", "", False, replace(asked, tools=[tool, *asked.tools[1:]]))
        call = '{"name":"f","parameters":{"a":"b"}}'
        for allowed in (text, call, LLAMA_G):
            assert allows(tokenizer, grammar, allowed), allowed
        if "const" in schema or schema is references:
            assert not allows(tokenizer, grammar, call.replace('"b"', '"c"'))
        assert not allows(tokenizer, grammar, wrong)


def test_many_choices_may_follow_thoughts(tokenizer: Tokenizer) -> None:
    texts = [f'{number} is/was\n"{number * 7}"' for number in range(1000)]
    other = as_lark(Guide("choice", json.dumps(texts)))
    for reasoning, before in (("qwen3", "<think>so</think>"), ("gpt-oss", f"{ANALYSIS}{HEAD}final<|message|>")):
        grammar = write(tokenizer, "hermes", reasoning, False, Wanted(other=other))
        assert allows(tokenizer, grammar, before + texts[999]) and not allows(tokenizer, grammar, before + "1000 is")


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_schemas_within_grammars_are_closed_as_guides_are(tokenizer: Tokenizer, form: str) -> None:
    """No 29 February where there is none, no name that is spelled otherwise, no format that is a note alone."""
    day, ident = {"type": "string", "format": "date"}, {"type": "string", "format": "cuid", "pattern": "^c.$"}
    schema = {"type": "object", "properties": {"day": day, "id": ident}}
    closed = {**schema, "additionalProperties": False}  # or a call would be of it, too
    other = as_lark(Guide("json", json.dumps(closed)))
    for strict, choice, others in ((True, "required", {}), (False, "required", {}), (True, "auto", {"other": other})):
        function = {"name": "f", "parameters": schema, "strict": strict}
        use = read_tools({"tools": [{"type": "function", "function": function}], "tool_choice": choice})
        assert use is not None
        asked = Wanted(use.callable, choice == "required", other_schema=closed if others else None, **others)
        grammar = write(tokenizer, form, "", False, asked)
        for arguments, is_right in (
            ('{"day": "2024-02-29", "id": "cx"}', True),
            ('{"day": "2023-02-29", "id": "cx"}', False),
            ('{"day": "2024-02-29", "id": "x"}', False),
            (r'{"d\u0061y": "2023-02-29"}', False),
        ):
            call = (HERMES_F if form == "hermes" else LLAMA_F).replace(ARGUMENTS, arguments)
            assert allows(tokenizer, grammar, call) == is_right, (strict, choice, arguments)
            assert not others or allows(tokenizer, grammar, arguments) == is_right


def test_what_cannot_be_followed_is_left_out_of_tools_that_are_not_strict(tokenizer: Tokenizer) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {**SCHEMA, "properties": {"a": numbers, "pattern": {"type": "string", "pattern": "^(?!x)y"}}}
    for strict in (False, True):
        function = {"name": "f", "parameters": schema, "strict": strict}
        use = read_tools({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
        assert use is not None
        grammar = write(tokenizer, "hermes", "", False, Wanted(use.callable, must_call=True))
        if strict:
            with pytest.raises(InvalidRequestError, match="uniqueItems"):
                allows(tokenizer, grammar, HERMES_F)
        else:
            assert allows(tokenizer, grammar, HERMES_F.replace(ARGUMENTS, '{"a": [1, 1], "pattern": "x"}'))
            assert not allows(tokenizer, grammar, HERMES_F.replace(ARGUMENTS, '{"a": [1, 1], "pattern": 1}'))
            assert not allows(tokenizer, grammar, HERMES_F.replace(ARGUMENTS, '{"a": ["x"]}'))


def test_notes_are_left_out_of_schemas_and_values_are_not() -> None:
    schema = {
        "title": "t", "properties": {"title": {"description": "d", "enum": ["title"]}, "default": {"default": 1}},
        "anyOf": [{"const": {"title": 1}, "examples": [1]}], "$defs": {"description": True},
    }  # fmt: skip
    assert without_notes(schema) == {
        "properties": {"title": {"enum": ["title"]}, "default": {}},
        "anyOf": [{"const": {"title": 1}}],
        "$defs": {"description": True},
    }


def test_many_tools_are_no_rules_too_many(tokenizer: Tokenizer) -> None:
    """Colons of schemas are none of the grammar's."""
    properties = {f"key_{number}": {"type": "string", "maxLength": 5} for number in range(20)}
    function = {"parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": {"name": f"f{number}", **function}} for number in range(60)]
    use = read_tools({"tools": tools, "tool_choice": "required"})
    assert use is not None
    grammar = write(tokenizer, "hermes", "", False, Wanted(use.callable, must_call=True))
    assert grammar.count(":") > 2000
    assert allows(tokenizer, grammar, HERMES_F.replace('"f"', '"f59"').replace(ARGUMENTS, "{}"))
