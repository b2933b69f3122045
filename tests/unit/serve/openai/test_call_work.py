"""How much work parsers have with texts that nearly are calls: in proportion to the text's length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from unittest import mock

import pytest

from launch.serve.api.openai.output import tagged_calls
from launch.serve.api.openai.output.json_values import CallObject, ValueEnd
from launch.serve.api.openai.output.machine import (
    Arguments,
    CallBegin,
    Event,
    Machine,
    Reasoning,
    Text,
    find_mark,
    joined,
    may_become,
)
from launch.serve.api.openai.output.parsing import ChoiceParser, Parsing

NEAR_CALLS = [
    ("hermes", '<tool_call>{"a":['),
    ("hermes", '<tool_call>{"arguments":{"a":'),
    ("llama3_json", '<|python_tag|>{"a":['),
    ("mistral", '[TOOL_CALLS][{"a":['),
    ("mistral", "[TOOL_CALLS]f[ARGS]{ "),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ "),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ "),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f "),
]


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize(("tools", "part"), NEAR_CALLS)
def test_calls_in_calls_that_do_not_end_are_looked_at_a_few_times(tools: str, part: str, size: int) -> None:
    """Each mark begins a call that reaches to the end of the text, and is none."""
    text = part * 1500
    num_read, find = 0, ValueEnd.find

    def counted(end: ValueEnd, looked_at: str, begin: int) -> tuple[int, bool]:
        nonlocal num_read
        place, is_over = find(end, looked_at, begin)
        num_read += place - begin
        return place, is_over

    parser = ChoiceParser(Parsing(tools, names=("f",)))
    with mock.patch.object(ValueEnd, "find", counted):
        parts = range(0, len(text), size)
        found = [event for begin in parts for event in parser.feed(text[begin : begin + size], False)]
        found += parser.feed("", True)
    told = joined(found)
    assert [type(event) for event in told] == [Text]
    assert "".join(told[0].text.split()) == "".join(text.split())  # type: ignore[union-attr]
    assert num_read < 40 * len(text)


NONE = "<tool_call>{x<function= "


@pytest.mark.parametrize(
    ("tools", "reasoning", "part"),
    [
        ("hermes", "", NONE),
        ("hermes", "qwen3", NONE),
        ("qwen3_coder", "qwen3", NONE),
        ("glm45", "qwen3", "<tool_call>f <arg_key"),
        ("glm47", "", "<tool_call>f<tool_call>"),
        ("minimax_m2", "qwen3", '<minimax:tool_call><invoke name="f'),
        ("deepseek_v32", "", "<｜DSML｜function_calls> <｜DSML｜invoke name="),
        ("kimi_k2", "qwen3", "<|tool_calls_section_begin|><|tool_call_begin|>f "),
    ],
)
def test_what_is_moved_for_calls_that_are_none_is_in_proportion(tools: str, reasoning: str, part: str) -> None:
    """An answer that comes whole: what is taken off its frontend, or handed to a parser of one call and taken back,
    must not be all of the rest each time."""
    text = part * 2000
    moved, take, feed = 0, Machine._take, CallObject.feed

    def counted_take(machine: Machine, count: int) -> str:
        nonlocal moved
        moved += len(machine._text)
        return take(machine, count)

    def counted_feed(of: CallObject, part: str) -> Sequence[Event]:
        nonlocal moved
        moved += len(part)
        return feed(of, part)

    parser = ChoiceParser(Parsing(tools, reasoning, is_thinking=True))
    with mock.patch.object(Machine, "_take", counted_take), mock.patch.object(CallObject, "feed", counted_feed):
        told = joined([*parser.feed(text, False), *parser.feed("", True)])
    assert [type(event) for event in told] == [Reasoning if reasoning else Text]
    assert "".join(told[0].text.split()) == "".join(text.split())  # type: ignore[union-attr]
    assert moved < 500 * len(text)


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    ("tools", "head", "part"),
    [
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "\n<arg_key>b</arg_key>"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>", "<tool_call></arg_key>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">', '\n<parameter name="a">'),
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">', "</｜DSML｜invoke>\nx"),
    ],
)
def test_a_value_with_many_marks_that_do_not_end_it_is_looked_at_once(
    tools: str, head: str, part: str, size: int
) -> None:
    """A text of a call that never ends: what was told of it is not looked at again."""
    text, looked_at, find = part * 800, 0, tagged_calls.find_mark

    def counted(searched: str, marks: Sequence[str]) -> tuple[int, str]:
        nonlocal looked_at
        looked_at += len(searched)
        return find(searched, marks)

    parser = ChoiceParser(Parsing(tools, names=("f",), schemas={"f": '{"properties": {"a": {"type": "string"}}}'}))
    with mock.patch.object(tagged_calls, "find_mark", counted):
        found = parser.feed(head, False)
        found += [e for begin in range(0, len(text), size) for e in parser.feed(text[begin : begin + size], False)]
        found += parser.feed("", True)
    told = json.loads("".join(event.text for event in found if isinstance(event, Arguments)) + '"}')
    assert told == {"a": text}
    assert looked_at < 100 * len(text)


def test_text_behind_what_may_end_a_call_does_not_wait_for_ever() -> None:
    """Nor do blanks."""
    parser = ChoiceParser(
        Parsing("minimax_m2", names=("f",), schemas={"f": '{"properties": {"a": {"type": "string"}}}'})
    )
    parser.feed('<minimax:tool_call><invoke name="f"><parameter name="a">x</invoke>', False)
    found = [event for _ in range(200) for event in parser.feed(" ", False)]
    assert "".join(event.text for event in found if isinstance(event, Arguments)).startswith("</invoke>   ")


@pytest.mark.parametrize("size", [1, 10, 1 << 20])
def test_after_many_long_failures_all_is_text_wherever_it_is_cut(size: int) -> None:
    failing = f'<tool_call>{{"a": "{"x" * 1100}", 5}} '
    called = '<tool_call>{"name": "f"}</tool_call>'
    for often, is_called in ((15, True), (16, False)):
        text = failing * often + called
        parser = ChoiceParser(Parsing("hermes"))
        found = [
            event for begin in range(0, len(text), size) for event in parser.feed(text[begin : begin + size], False)
        ]
        assert any(isinstance(event, CallBegin) for event in [*found, *parser.feed("", True)]) == is_called


def test_the_first_mark_is_found() -> None:
    assert find_mark("x <ab> <a>", ("<a>", "<ab>")) == (2, "<ab>")
    assert find_mark("x <abc", ("<ab", "<abc")) == (2, "<abc")
    assert find_mark("x <a", ("<ab>", "<c>")) == (2, "")


def test_a_whole_mark_does_not_become_itself() -> None:
    assert may_become("<to", "<tool>") and may_become("", "<tool>")
    assert not may_become("<tool>", "<tool>") and not may_become("<tool>!", "<tool>") and not may_become("to", "<tool>")
