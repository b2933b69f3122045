"""Parsers of what models write: calls in each family's form, thoughts, and text, wherever the text is cut."""

from __future__ import annotations

import json
import random

import pytest
from call_texts import CALL, CALLS, CITY, CITY_JSON, END, END_CALLS, SCHEMAS_AS_JSON, SEP, TEXTS, call, parse
from family_texts import FAMILY_TEXTS, FORMS, kimi_call

from launch.serve.api.openai.output import marked_calls as marked
from launch.serve.api.openai.output.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event, Reasoning, Text
from launch.serve.api.openai.output.parsing import ChatText, ChoiceParser, Parsing


@pytest.mark.parametrize(("tools", "reasoning", "text", "found"), [*TEXTS, *FAMILY_TEXTS])
def test_what_is_found_does_not_depend_on_where_the_text_is_cut(
    tools: str, reasoning: str, text: str, found: list[Event]
) -> None:
    parsing = Parsing(tools, reasoning, names=("f", "g"), schemas=SCHEMAS_AS_JSON)
    assert parse(parsing, [text]) == found
    assert parse(parsing, list(text)) == found
    for place in range(len(text)):
        assert parse(parsing, [text[:place], text[place:]]) == found, place


OF_ALL = ["]", "{", "[", '"', "\\", ": ", ", ", " ", "\n", ";", "<think>", "</think>", "{}", '"a": 1', "x", "é"]
OF_FAMILY = {
    "glm45": [
        "<tool_call>",
        "</tool_call>",
        "f",
        "\n",
        "<arg_key>",
        "city",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    "minimax_m2": [
        *(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="f">',
            "</invoke>",
            '<parameter name="',
            'city">',
        ),
        *("</parameter>", '<parameter name="days">', "\n"),
    ],
    "deepseek_v32": [
        *(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            '<｜DSML｜invoke name="f">',
            "</｜DSML｜invoke>",
            "\n",
        ),
        *('<｜DSML｜parameter name="city"', ' string="true">', ' string="false">', "</｜DSML｜parameter>"),
    ],
    "kimi_k2": [*marked.KIMI, "functions.f:0", '{"a": ', "{}", "}", " "],
}
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|start|>", "analysis", "commentary to=functions.f", "f", '{"name": "f", "arguments": {', '{"name": "g"}', "}",
    "<function=", "<function=f>", "</function>", "<parameter=", "<parameter=city>", "<parameter=days>", "</parameter>",
    "<TOOLCALL>", "</TOOLCALL>", *marked.DEEPSEEK, "```json", "```", "function", f"{CALL}f{SEP}", *OF_ALL,
]  # fmt: skip


@pytest.mark.parametrize(
    "tools",
    [
        *("hermes", "llama3_json", "mistral", "json", "gpt-oss", "qwen3_coder", "deepseek_v3", ""),
        *OF_FAMILY,
    ],
)
def test_nonsense_is_the_same_wherever_it_is_cut_and_nothing_of_it_is_lost(tools: str) -> None:
    for seed in range(150):
        draw = random.Random(seed)
        text = _damaged(draw, tools) if tools in OF_FAMILY else "".join(draw.choices(PIECES, k=draw.randrange(1, 25)))
        reasoning = "gpt-oss" if tools == "gpt-oss" else draw.choice(["", "qwen3", "deepseek_r1"])
        parsing = Parsing(
            tools, reasoning, draw.random() < 0.5, ("f", "g"), draw.random() < 0.2, schemas=SCHEMAS_AS_JSON
        )
        whole = parse(parsing, [text])
        assert parse(parsing, list(text)) == whole, (seed, text)
        cuts = sorted(draw.choices(range(len(text) + 1), k=4))
        parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parsing, parts) == whole, (seed, text)
        if not any(isinstance(event, CallBegin) for event in whole) and tools != "gpt-oss":
            told = "".join(event.text for event in whole if not isinstance(event, CallBegin))
            left = text.replace("<think>", "").replace("</think>", "") if reasoning else text
            told = told.replace("<think>", "").replace("</think>", "") if reasoning else told
            assert "".join(told.split()) == "".join(left.split()), (seed, text)


def _damaged(draw: random.Random, tools: str) -> str:
    """A text with calls, in which pieces are put in or are missing."""
    text = draw.choice([text for name, _, text, _ in FAMILY_TEXTS if name == tools and len(text) < 300])
    for _ in range(draw.randrange(5)):
        begin, most = draw.randrange(len(text) + 1), draw.choice([0, 0, 1, 3, 12])
        text = text[:begin] + draw.choice([*OF_FAMILY[tools], *OF_ALL, ""]) + text[begin + most :]
    return text


THOUGHTS = [
    ("<think>\na b\n</think>\n\nHello ", [Reasoning("a b"), Text("Hello ")], [Reasoning("a b"), Text("Hello ")]),
    ("a </think> b", [Text("a </think> b")], [Reasoning("a"), Text("b")]),
    ("  plain", [Text("  plain")], [Reasoning("plain")]),
    ("<think>cut off </thi", [Reasoning("cut off </thi")], [Reasoning("cut off </thi")]),
    ("<thin", [Text("<thin")], [Reasoning("<thin")]),
    ("<think></think>x", [Text("x")], [Text("x")]),
    (
        'why</think><tool_call>{"name": "f"}</tool_call>',
        [Text("why</think>"), *call("f")],
        [Reasoning("why"), *call("f")],
    ),
]


@pytest.mark.parametrize(("text", "begun_by_itself", "begun_in_the_prompt"), THOUGHTS)
def test_thoughts_are_told_apart(text: str, begun_by_itself: list[Event], begun_in_the_prompt: list[Event]) -> None:
    for is_thinking, found in ((False, begun_by_itself), (True, begun_in_the_prompt)):
        parsing = Parsing("hermes", "qwen3", is_thinking)
        assert parse(parsing, [text]) == found
        assert parse(parsing, list(text)) == found


def test_a_heading_is_no_thought() -> None:
    for text, found in (
        ("<|channel>thought\nSo it is.\n<channel|>Yes.", [Reasoning("So it is."), Text("Yes.")]),
        ("<|channel>thought\n<channel|>Yes.", [Text("Yes.")]),
        ("<|channel>that is<channel|>Yes.", [Reasoning("that is"), Text("Yes.")]),
        ("<|channel>thou", [Reasoning("thou")]),
    ):
        assert parse(Parsing("", "gemma4"), [text]) == parse(Parsing("", "gemma4"), list(text)) == found


CALLED = [
    ("hermes", "qwen3", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '{"a": 1}'),
    ("qwen3_coder", "qwen3", f"<tool_call>\n<function=f>\n{CITY}\n</function>\n</tool_call>", f"{{{CITY_JSON}}}"),
    ("qwen3_coder", "qwen3", f"<function=f>\n{CITY}\n</function>\n</tool_call>", f"{{{CITY_JSON}}}"),
    ("deepseek_v3", "deepseek_r1", f"{CALLS}{CALL}function{SEP}f\n```json\n{{}}\n```{END}{END_CALLS}", "{}"),
    ("deepseek_v31", "deepseek_r1", f'{CALL}f{SEP}{{"a": 1}}{END}{END_CALLS}', '{"a": 1}'),
    ("mistral", "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', '{"a": 1}'),
    ("llama_nemotron_json", "qwen3", '<TOOLCALL>[{"name": "f"}]</TOOLCALL>', "{}"),
    ("llama3_json", "qwen3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
    ("gemma4", "gemma4", "<|tool_call>call:f{a:1}<tool_call|>", '{"a": 1}'),
    ("kimi_k2", "qwen3", f"{marked.KIMI.calls}{kimi_call('f', '{}')}{marked.KIMI.end_calls}", "{}"),
    *(
        (name, "qwen3", form.calls(form.one("f", form.argument("city", "Rome", True))), '{"city": "Rome"}')
        for name, form in FORMS.items()
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "text", "arguments"), CALLED)
def test_a_call_ends_thoughts_that_are_not_ended(tools: str, reasoning: str, text: str, arguments: str) -> None:
    """A mark that thoughts only talk about does not; and where there are no tools it is one of their words."""
    form, mark = REASONING_FORMATS[reasoning], TOOL_FORMATS[tools].call_marks[0]
    for is_thinking in (True, False):
        begin = "" if is_thinking else form.open_mark
        talked = f"{begin}I look with `{mark}`.\n"
        for written, found in (
            (f"{talked}{text}", [Reasoning(f"I look with `{mark}`."), *call("f", arguments)]),
            (f"{talked}\n{form.close_mark}\n{text}", [Reasoning(f"I look with `{mark}`."), *call("f", arguments)]),
            (f"{talked}{mark}", [Reasoning(f"I look with `{mark}`.\n{mark}")]),
            (f"{talked}{form.close_mark}So.", [Reasoning(f"I look with `{mark}`."), Text("So.")]),
        ):
            parsing = Parsing(tools, reasoning, is_thinking, ("f", "g"), schemas=SCHEMAS_AS_JSON)
            for size in (1, 7, len(written)):
                parts = [written[place : place + size] for place in range(0, len(written), size)]
                assert parse(parsing, parts) == found, (is_thinking, size)
        whole = parse(Parsing("", reasoning, is_thinking), [f"{talked}{text}"])
        assert whole == [Reasoning(f"I look with `{mark}`.\n{text}")]


@pytest.mark.parametrize(("tools", "reasoning", "text", "found"), [*TEXTS, *FAMILY_TEXTS])
def test_deltas_join_to_the_whole_message(tools: str, reasoning: str, text: str, found: list[Event]) -> None:
    parsing = Parsing(tools, reasoning, names=("f", "g"), schemas=SCHEMAS_AS_JSON)
    whole, streamed = ChatText(parsing), ChatText(parsing)
    whole.keep(text, True)
    message = whole.message()
    content, arguments, names = "", list[str](), list[str]()
    for place, character in enumerate(text):
        for delta in streamed.deltas(character, place == len(text) - 1):
            content += delta.get("content", "")
            for told in delta.get("tool_calls", ()):
                if "id" in told:
                    assert told["index"] == len(names) and told["type"] == "function"
                    assert told["function"]["arguments"] == ""
                    names.append(told["function"]["name"])
                    arguments.append("")
                else:
                    arguments[told["index"]] += told["function"]["arguments"]
    assert content == (message["content"] or "")
    calls = message.get("tool_calls", [])
    assert [(item["function"]["name"], item["function"]["arguments"]) for item in calls] == [
        *zip(names, arguments, strict=True)
    ]
    assert len({item["id"] for item in calls}) == len(calls) and whole.has_calls == bool(calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = ChoiceParser(Parsing("hermes"))
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"text": "on', False) == call("f", '{"text": "on')
    assert parser.feed("ce upon", False) == [Arguments("ce upon")]
    assert parser.feed(' a time"', False) == [Arguments(' a time"')]
    assert parser.feed("}} </tool_call>", True) == [Arguments("}")]


def test_texts_behind_parameters_come_as_they_are_written_and_other_values_whole() -> None:
    parser = ChoiceParser(Parsing("qwen3_coder", schemas=SCHEMAS_AS_JSON))
    assert parser.feed("<tool_call>\n<function=f>\n<parameter=city>\non", False) == call("f", '{"city": "on')
    assert parser.feed('ce "upon"\n', False) == [Arguments('ce \\"upon\\"')]
    assert parser.feed("</param", False) == []
    assert parser.feed("s>", False) == [Arguments("\\n</params>")]
    assert parser.feed("\n</parameter>\n<parameter=days>\n1", False) == [Arguments('", "days": ')]
    assert parser.feed("2\n</parameter>", False) == [Arguments("12")]
    assert parser.feed("\n</function>\n</tool_call>", True) == [Arguments("}")]


def test_an_object_that_is_no_call_is_told_as_it_comes() -> None:
    parser = ChoiceParser(Parsing("llama3_json", names=("f",)))
    assert parser.feed('{"answer": "on', False) == [Text('{"answer": "on')]
    assert parser.feed("ce upon", False) == [Text("ce upon")]


def test_one_call_is_kept_where_one_was_asked_for() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert parse(Parsing("hermes", keeps_one=True), list(text)) == call("f")


def test_ids_of_calls_are_what_templates_want_back() -> None:
    text = ChatText(Parsing("mistral"))
    text.keep('[TOOL_CALLS][{"name": "f"}]', True)
    call_id = text.message()["tool_calls"][0]["id"]
    assert len(call_id) == 9 and call_id.isalnum()


def test_forms_are_found_by_name_and_by_template() -> None:
    for template, tools, reasoning in (
        ("<tool_call>", "hermes", ""),
        ("<tool_call> </think>", "hermes", "qwen3"),
        ("<tool_call><function=", "", ""),
        ("<tool_call><function= <parameter= </think>", "qwen3_coder", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|tool_call>call: {{ thoughts.split('<channel|>') }} <|channel>", "gemma4", "gemma4"),
        ("<|tool_call>", "", ""),
        ("<|python_tag|>", "llama3_json", ""),
        ("<|python_tag|> <function=", "", ""),  # Functionary's
        ("<tool_call></tool_call> <tool_calls>[", "", ""),  # Apriel's
        ("<｜Assistant｜></think>", "", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜> \n```json <｜Assistant｜></think>", "deepseek_v3", "deepseek_r1"),
        ("<TOOLCALL>[{{", "llama_nemotron_json", ""),
        ("<｜tool▁call▁begin｜>name<｜tool▁sep｜>", "deepseek_v31", ""),
        ("<｜tool▁call▁begin｜> {% if not thinking is defined %} <｜Assistant｜></think>", "deepseek_v31", "qwen3"),
        (
            "{% set token = '｜DSML｜' %} <{{ token }}function_calls> <｜Assistant｜> enable_thinking </think>",
            "deepseek_v32",
            "qwen3",
        ),
        ("<｜DSML｜tool_calls>", "deepseek_v4", ""),
        (
            "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value> </think>",
            "glm45",
            "qwen3",
        ),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>", "glm47", ""),
        ("<tool_call><arg_key>", "", ""),
        ("{% set mark = ']<]minimax[>[' %}{{ mark }}<tool_call></think>", "", "qwen3"),
        ('<minimax:tool_call>\n<invoke name="{{ name }}"> <think> </think>', "minimax_m2", "qwen3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }} <think></think>", "kimi_k2", "qwen3"),
        ("<|start|><|channel|>", "gpt-oss", "gpt-oss"),
        ("{{ messages }}", "", ""),
        (None, "", ""),
    ):
        assert (find_tool_format(None, template), find_reasoning_format(None, template)) == (tools, reasoning)
        assert (find_tool_format("none", template), find_reasoning_format("none", template)) == ("", "")
    assert (find_tool_format("openai", ""), find_tool_format("mistral", "<tool_call>")) == ("gpt-oss", "mistral")
    with pytest.raises(ValueError, match="there is no 'hermse' \\(did you mean 'hermes'"):
        find_tool_format("hermse", None)
    assert find_reasoning_format("glm45", None) == "qwen3"
    with pytest.raises(ValueError, match="deepseek_r1"):
        find_reasoning_format("deepseek_r", None)


def test_long_arguments_take_time_in_proportion() -> None:
    """A call of a megabyte in pieces of a few characters: what was told is not looked at again."""
    arguments = json.dumps({"text": "x" * (1 << 20)})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    parser = ChoiceParser(Parsing("hermes"))
    for begin in range(0, len(text), 64):
        parser.feed(text[begin : begin + 64], False)
        assert len(parser._calls._call.text) < 1024 if begin > 64 else True  # type: ignore[union-attr]
    assert parser.num_calls == 1
