"""Tools in chats, through OpenAI's own client: a made-up checkpoint that speculates is guided to write real calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import templates
from chat_server import MARKS, ChatServer
from tool_chats import ASKED, COMPACT, MESSAGES, NAMED, STRICT, TOOLS, WEATHER, ask, joined, stream, whole

from trtrun.chats.chat_template import ChatTemplate

pytestmark = pytest.mark.timeout(240)
CLOSE_THOUGHTS = {str(1 + MARKS.index("</think>")): 100.0}
FAMILIES = ["PLAIN", "HERMES", "QWEN3", "LLAMA", "MISTRAL", "MISTRAL_NEW", "QWEN3_CODER", "DEEPSEEK_V3", "NEMOTRON"]
NEWER = ["GLM45", "MINIMAX", "DSML", "KIMI"]
FAMILIES += NEWER


def check_call(name: str, arguments: str) -> None:
    schema = WEATHER if name == "weather" else {"const": {}}
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(
    ("family", "choice"), [*((family, "required") for family in FAMILIES), ("PLAIN", "named"), ("HERMES", "named")]
)
def test_a_call_that_is_wanted_is_made_as_its_schema_says(server: ChatServer, family: str, choice: str) -> None:
    template = getattr(templates, family)
    asked: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 400}
    asked["tool_choice"] = NAMED if choice == "named" else choice
    answer = ask(server, template, **asked)
    content, thoughts, ((name, arguments),), reason = whole(answer)
    check_call(name, arguments)
    assert (content, thoughts, reason) == ("", "", "tool_calls") and answer.choices[0].message.content is None
    assert name == "weather" or choice == "required"
    assert joined(stream(server, template, **asked)) == whole(answer)
    # Texts are plain decoding's.
    for others in ({"temperature": 0}, {"seed": 11})[: 2 if family == "HERMES" else 1]:
        told = ask(server, template, **asked, **others, extra_body={"return_token_ids": True})
        plain = ask(server, template, **asked, **others, extra_body={"return_token_ids": True, "draft_len": 0})
        assert told.choices[0].token_ids == plain.choices[0].token_ids and whole(told) == whole(plain)
        assert told.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("reasoning", ["DEEPSEEK", "QWEN3"])
def test_a_model_thinks_before_a_call_that_is_wanted(server: ChatServer, reasoning: str) -> None:
    template = getattr(templates, reasoning)
    # What ends thoughts is made likely: a random model thinks for ever.
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "logit_bias": CLOSE_THOUGHTS}
    if reasoning == "QWEN3":
        asked["logit_bias"] = {str(1 + MARKS.index("<think>")): 20.0, **CLOSE_THOUGHTS}
    answer = ask(server, template, **asked)
    content, _, ((name, arguments),), reason = whole(answer)
    check_call(name, arguments)
    assert (content, name, reason) == ("", "weather", "tool_calls")
    assert joined(stream(server, template, **asked)) == whole(answer)


@pytest.mark.parametrize(
    ("family", "mark"),
    [
        ("HERMES", "<tool_call>"),
        ("LLAMA", "<|python_tag|>"),
        ("MISTRAL", "[TOOL_CALLS]"),
        ("QWEN3_CODER", "<tool_call>"),
    ],
)
def test_strict_tools_are_guided_where_the_model_calls_one_by_itself(
    server: ChatServer, family: str, mark: str
) -> None:
    """Its mark is made likely: behind it there is a call, whatever the model would have written."""
    template = getattr(templates, family)
    bias = {str(1 + MARKS.index(mark)): 100.0}
    found = ask(server, template, tools=STRICT, logit_bias=bias, parallel_tool_calls=False, max_tokens=120)
    _, _, ((name, arguments),), _ = whole(found)
    check_call(name, arguments)
    # Else it writes what it does, which is no call, and is told as it is.
    told = ask(server, template, tools=TOOLS, logit_bias=bias, max_tokens=20)
    assert not told.choices[0].message.tool_calls and mark in told.choices[0].message.content
    free = ask(server, template, tools=STRICT, max_tokens=20)
    assert not free.choices[0].message.tool_calls and free.choices[0].message.content


TEXT = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def written(text: str) -> dict[str, Any]:
    """What makes a model write a text."""
    lark, rest = [], text
    while rest:
        mark = min((mark for mark in MARKS if mark in rest), key=rest.index, default="")
        before, _, rest = rest.partition(mark) if mark else (rest, "", "")
        lark += [json.dumps(before)] if before else []
        lark += [f"<[{1 + MARKS.index(mark)}]>"] if mark else []
    return {"guided_grammar": f"start: {' '.join(lark)}"}


def test_what_the_model_writes_by_itself_is_read(server: ChatServer) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "n": 2, "logprobs": True, "extra_body": written(TEXT)}
    strict = ask(server, templates.HERMES, **{**asked, "tools": STRICT})
    answer = ask(server, templates.HERMES, **asked)
    expected = ("Let me see.", "", [("weather", '{"city": "Oslo"}')], "tool_calls")
    assert whole(answer) == whole(answer, 1) == whole(strict) == expected
    chunks = stream(server, templates.HERMES, **asked, stream_options={"include_usage": True})
    assert joined(chunks) == joined(chunks, 1) == expected
    scores = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert sum(map(len, scores)) == sum(len(choice.logprobs.content) for choice in answer.choices)
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    # A text that is cut is told as far as it came.
    cut = ask(server, templates.HERMES, tools=TOOLS, extra_body=written(TEXT), stop=["Oslo"])
    assert whole(cut) == ("Let me see.", "", [("weather", '{"city": "')], "tool_calls")
    cut = ask(server, templates.HERMES, tools=TOOLS, extra_body=written(TEXT), stop=["weather"])
    assert whole(cut) == ('Let me see. <tool_call>\n{"name": "', "", [], "stop")
    cut = ask(server, templates.HERMES, tools=TOOLS, extra_body=written(TEXT), max_tokens=len(TEXT) - 60)
    assert whole(cut)[3] == "length"


def test_arguments_that_are_written_as_text_are_told_as_json_of_their_schema(server: ChatServer) -> None:
    note = {"type": "object", "properties": {"text": {"type": "string"}, "to": {}, "loud": {"type": "boolean"}}}
    tools = [{"type": "function", "function": {"name": "note", "parameters": note}}]
    text = (
        "So: <tool_call>\n<function=note>\n<parameter=text>\n5\n</parameter>\n<parameter=to>\n5\n</parameter>\n"
        "<parameter=loud>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    asked: dict[str, Any] = {"tools": tools, "extra_body": written(text), "max_tokens": 240}
    answer = ask(server, templates.QWEN3_CODER, **asked)
    expected = ("So:", "", [("note", '{"text": "5", "to": 5, "loud": true}')], "tool_calls")
    assert whole(answer) == expected
    assert joined(stream(server, templates.QWEN3_CODER, **asked)) == expected
    # An answer goes back as it came, and stands in the prompt as the model writes it.
    earlier = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True)]
    again = ask(server, templates.QWEN3_CODER, tools=tools, messages=earlier, max_tokens=1)
    assert again.usage.prompt_tokens > len(text) - len("</tool_call>") * 2
    # What a schema says and calls in this form cannot be held to is refused where they are to be held to it.
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"allOf": [{}]}, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.parameters has allOf at its root"):
        ask(server, templates.QWEN3_CODER, tools=wrong, tool_choice="required")
    wrong[0]["function"]["strict"] = False  # type: ignore[index]
    assert ask(server, templates.QWEN3_CODER, tools=wrong, tool_choice="required", max_tokens=2)


@pytest.mark.parametrize("family", [*NEWER, "GLM47"])
def test_an_answer_goes_back_as_its_template_writes_it(server: ChatServer, family: str) -> None:
    """A call that is read stands in the next prompt as the model wrote it, and is read from a stream alike."""
    template = getattr(templates, family)
    note = {"type": "object", "properties": {"text": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": note}} for name in ("note", "other")]
    first = {"text": 'a "b" <c>\nd', "days": 3}
    calls = [
        {"id": f"functions.{name}:{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate([("note", first), ("other", {"text": "5"})])
    ]
    rendered = ChatTemplate(template, {}).render([{"role": "assistant", "content": "", "tool_calls": calls}], False)
    text = f"So: {rendered.removeprefix('# assistant').strip()}"
    asked: dict[str, Any] = {"tools": tools, "extra_body": written(text), "max_tokens": 600}
    answer = ask(server, template, **asked)
    told = answer.choices[0].message
    assert whole(answer)[0] == "So:" and whole(answer)[3] == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in told.tool_calls] == [
        ("note", first),
        ("other", {"text": "5"}),
    ]
    assert joined(stream(server, template, **asked)) == whole(answer)
    if family == "KIMI":  # whose template shows a call's name in its id alone
        assert [call.id for call in told.tool_calls] == ["functions.note:0", "functions.other:1"]
    back = [
        {"id": call.id, "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)}}
        for call in told.tool_calls
    ]
    again = {"role": "assistant", "content": "", "tool_calls": back}
    assert ChatTemplate(template, {}).render([again], False) == rendered


def test_where_no_tool_may_be_called_a_text_is_told_as_it_is(server: ChatServer) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        answer = ask(server, templates.HERMES, **fields, extra_body=written(TEXT))
        shown = TEXT.replace("<tool_call>", "").replace("</tool_call>", "")  # special tokens, which texts lack
        assert whole(answer) == (shown, "", [], "stop")
        assert joined(stream(server, templates.HERMES, **fields, extra_body=written(TEXT))) == whole(answer)
    kept = written(TEXT) | {"skip_special_tokens": False}
    assert whole(ask(server, templates.HERMES, extra_body=kept)) == (TEXT, "", [], "stop")
    answer = ask(server, templates.HERMES, tools=TOOLS, extra_body=written(TEXT), model="chat")
    assert whole(answer)[2]
    off = server.ask(
        templates.HERMES,
        lambda client: client.chat.completions.create(**ASKED, tools=TOOLS, extra_body=kept),
        tool_parser="none",
    )
    assert whole(off) == (TEXT, "", [], "stop")


def test_a_format_of_the_answer_and_tools_go_together(server: ChatServer) -> None:
    """As agents with a typed output ask: either a call, or the answer."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "end", "schema": {**COMPACT, "const": {"a": 1}}}}
    for letter, expected in (("a", ('{"a":1}', "", [], "stop")), ("n", ("", "", [("clock", "{}")], "tool_calls"))):
        asked = {"tools": STRICT[1:], "response_format": form, "parallel_tool_calls": False}
        bias = {str(server.token_of(letter)): 100.0}  # both begin with a brace and a quote
        assert whole(ask(server, templates.LLAMA, **asked, logit_bias=bias)) == expected


def test_thoughts_stand_beside_the_answer(server: ChatServer) -> None:
    text = "<think>\nLet me see.\n</think>\n\nIt is.\n"
    expected = ("It is.\n", "Let me see.", [], "stop")
    answer = ask(server, templates.QWEN3, extra_body=written(text))
    # A grammar is of all of the text: nothing is told apart.
    assert whole(answer)[0].startswith("\nLet me see.")
    regex = {"guided_regex": "It is[.]\\n"}
    bias = {str(1 + MARKS.index("<think>")): 100.0, **CLOSE_THOUGHTS}
    found = ask(server, templates.QWEN3, extra_body=regex, logit_bias=bias)
    assert whole(found)[0::2] == (expected[0], []) and found.choices[0].message.content == "It is.\n"
    thinking = ask(server, templates.DEEPSEEK, max_tokens=12)
    assert thinking.choices[0].message.content is None and thinking.choices[0].message.reasoning_content
    assert joined(stream(server, templates.DEEPSEEK, max_tokens=12)) == whole(thinking)
    kept = ask(server, templates.DEEPSEEK, max_tokens=12, extra_body={"separate_reasoning": False})
    assert kept.choices[0].message.content.strip() == thinking.choices[0].message.reasoning_content
    dropped = ask(server, templates.DEEPSEEK, max_tokens=12, extra_body={"include_reasoning": False})
    assert whole(dropped) == ("", "", [], "length")
    off = server.ask(
        templates.DEEPSEEK,
        lambda client: client.chat.completions.create(**{**ASKED, "max_tokens": 12}),
        reasoning_parser="none",
    )
    assert off.choices[0].message.content


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def test_the_clients_own_helpers_read_calls(server: ChatServer) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_tokens": 800}

    async def parse(client: openai.AsyncOpenAI) -> Any:
        answer = await client.chat.completions.parse(**asked)
        (call,) = answer.choices[0].message.tool_calls or []
        # And the conversation goes on with the client's own objects.
        behind = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        last = await client.chat.completions.create(**{**asked, "messages": behind, "tool_choice": "none"})
        assert last.choices[0].message.content and not last.choices[0].message.tool_calls
        return call.function

    function = server.ask(templates.HERMES, parse)
    assert isinstance(function.parsed_arguments, Weather) and function.name == "Weather"

    async def streamed(client: openai.AsyncOpenAI) -> Any:
        kinds = []
        async with client.chat.completions.stream(**asked) as events:
            async for event in events:
                kinds.append(event.type)
            final = await events.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        return final.choices[0].message.tool_calls[0].function

    told = server.ask(templates.HERMES, streamed)
    assert (told.name, told.arguments) == (function.name, function.arguments)
    assert told.parsed_arguments == function.parsed_arguments


def test_what_langchain_and_instructor_send_is_answered(server: ChatServer) -> None:
    """Their requests, and how they read answers, written down from them."""
    schema = Weather.model_json_schema()
    function = {"name": "Weather", "description": schema.pop("description"), "parameters": schema}
    tools = [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "Weather"}}
    base: dict[str, Any] = {"model": "chat", "messages": [{"content": "hi", "role": "user"}], "max_tokens": 800}
    langchain = {**base, "stream": False, "tools": tools, "tool_choice": named, "parallel_tool_calls": False}
    instructor = {**base, "tools": tools, "tool_choice": named}
    for body in (langchain, instructor):
        asked: dict[str, Any] = {**body, "temperature": 0}
        answer = server.ask(templates.QWEN3, lambda client, asked=asked: client.chat.completions.create(**asked))
        message = answer.choices[0].message.model_dump()
        assert len(message["tool_calls"]) == 1
        call = message["tool_calls"][0]["function"]
        assert call["name"] == "Weather" and Weather.model_validate_json(call["arguments"])
    # LangChain's agents bind tools and put calls and results back, calls without content.
    history = [
        *base["messages"],
        {"content": None, "role": "assistant", "tool_calls": [
            {"type": "function", "id": "call_1", "function": {"name": "Weather", "arguments": '{"city": "Rome"}'}},
            {"type": "function", "id": "call_2", "function": {"name": "Weather", "arguments": "{broken"}},
        ]},
        {"content": "sunny", "role": "tool", "tool_call_id": "call_1"},
        {"content": [{"type": "text", "text": "no such city"}], "role": "tool", "tool_call_id": "call_2"},
    ]  # fmt: skip
    answer = ask(server, templates.QWEN3, messages=history, tools=tools, max_tokens=4)
    assert answer.usage.completion_tokens > 0


def test_a_part_of_the_tools_may_be_allowed(server: ChatServer) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = ask(server, templates.HERMES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert whole(answer)[2] == [("clock", "{}")]
    choice["allowed_tools"]["mode"] = "auto"
    bias = {str(1 + MARKS.index("<tool_call>")): 100.0}
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "logit_bias": bias}
    assert whole(ask(server, templates.HERMES, **asked))[2][0][0] == "clock"
    choice["allowed_tools"]["tools"] = []
    body = written('<tool_call>{"name": "clock"}</tool_call>')
    told = ask(server, templates.HERMES, tools=TOOLS, tool_choice=choice, extra_body=body)
    assert whole(told)[:3] == ('{"name": "clock"}', "", [])


@pytest.mark.parametrize("name", ["my tool", "a[b]", 'a"b', "a`b"])
@pytest.mark.parametrize("family", ["HERMES", "MISTRAL_NEW", "HARMONY", "QWEN3_CODER", "DEEPSEEK_V3"])
def test_names_that_calls_cannot_hold_are_refused(server: ChatServer, family: str, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
    if family == "HERMES":  # which quotes them
        assert whole(ask(server, templates.HERMES, **asked))[2] == [(name, "{}")]
        return
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[0\].function.name: this model's calls have names without"
    ):
        ask(server, getattr(templates, family), **asked)
    assert ask(server, getattr(templates, family), **{**asked, "tool_choice": "none", "max_tokens": 2})


def test_schemas_may_have_numbers_of_any_size(server: ChatServer) -> None:
    """Where arguments are read by their schema, it travels from those that read requests."""
    parameters = {"properties": {"days": {"type": "integer", "minimum": 3, "maximum": 10**30}}, "required": ["days"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**parameters, "description": "x" * 5000}}}]
    answer = ask(server, templates.QWEN3_CODER, tools=tools, extra_body=written("<function=f>\n<parameter=days>\n7"))
    assert whole(answer)[2] == [("f", '{"days": 7')]


def test_a_template_that_takes_one_call_an_answer_gets_no_more(server: ChatServer) -> None:
    template = templates.LLAMA + "{# This model only supports single tool-calls at once! #}"
    text = '{"name": "clock", "parameters": {}}'
    answer = ask(server, template, tools=TOOLS, extra_body=written(f"{text}; {text}"))
    assert whole(answer)[2] == [("clock", "{}")]
    both = ask(server, templates.LLAMA, tools=TOOLS, extra_body=written(f"{text}; {text}"))
    assert whole(both)[2] == [("clock", "{}")] * 2
    answer = ask(server, template, tools=TOOLS, tool_choice="required")
    assert len(answer.choices[0].message.tool_calls) == 1 and answer.choices[0].finish_reason == "tool_calls"


def test_completions_have_special_tokens_where_they_are_asked_for(server: ChatServer) -> None:
    prompt = "<|start|>x<|end|>"
    for skips, shown in ((True, "x"), (False, prompt)):
        body = {"skip_special_tokens": skips, "return_token_texts": True, "guided_grammar": "start: <[1]>"}
        asked: dict[str, Any] = {"model": "chat", "prompt": prompt, "echo": True, "max_tokens": 5, "extra_body": body}
        (choice,) = server.ask(templates.PLAIN, lambda client, asked=asked: client.completions.create(**asked)).choices
        assert choice.text == shown + ("" if skips else MARKS[0]) == shown + "".join(choice.token_texts)
