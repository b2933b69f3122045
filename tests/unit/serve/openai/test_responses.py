"""/v1/responses through OpenAI's own client, on a made-up checkpoint: whole, in events, and back as input."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
import templates
from chat_server import MARKS, ChatServer
from openai.types.responses import response_create_params
from tool_chats import CITY, COMPACT

from launch.serve.admission.refusals import Refusal
from launch.serve.api.openai.responses.items import read_items
from launch.serve.api.openai.responses.requests import RESPONSE_FIELDS, read_response

pytestmark = pytest.mark.timeout(240)
ASKED: dict[str, Any] = {"model": "chat", "input": "hi", "temperature": 1.0, "max_output_tokens": 12}
SEEDED: dict[str, Any] = {"extra_body": {"seed": 3}}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CLOSE_THOUGHTS = {str(1 + MARKS.index("<think>")): 20.0, str(1 + MARKS.index("</think>")): 100.0}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def ask(server: ChatServer, template: str = templates.HERMES, **fields: Any) -> Any:
    asked: dict[str, Any] = {**ASKED, **SEEDED, **fields}
    return server.ask(template, lambda client: client.responses.create(**asked))


def events_of(server: ChatServer, template: str = templates.HERMES, **fields: Any) -> list[Any]:
    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        asked: dict[str, Any] = {**ASKED, **SEEDED, **fields, "stream": True}
        return [event async for event in await client.responses.create(**asked)]

    return server.ask(template, read)


def without_ids(value: Any) -> Any:
    """An output without what is drawn for each answer."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "call_id")}
    return value


def test_a_text_is_answered_as_a_chat_is(server: ChatServer) -> None:
    answer = ask(server, metadata={"a": "b"}, store=False, user="me")
    (item,) = answer.output
    chat = server.ask(
        templates.HERMES,
        lambda client: client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], temperature=1.0, seed=3, max_tokens=12
        ),
    )
    assert answer.output_text == item.content[0].text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert item.status == "incomplete" and answer.id.startswith("resp_") and item.id.startswith("msg_")
    assert (answer.max_output_tokens, answer.metadata, answer.temperature) == (12, {"a": "b"}, 1.0)
    assert answer.tools == [] and answer.tool_choice == "auto" and answer.error is None
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    told, named = ask(server, instructions="be brief"), ask(server, input=system)
    assert told.output_text == named.output_text and told.instructions == "be brief"


def check_events(events: list[Any]) -> Any:
    """The last response, which the events before it tell of, in order."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[0].response.id == last.id and events[0].response.status == "in_progress"
    items, texts, num_open = dict[int, Any](), dict[int, str](), 0
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items) and num_open == 0 and event.item.status == "in_progress"
            items[event.output_index], texts[event.output_index], num_open = event.item, "", 1
        elif event.type == "response.output_item.done":
            assert event.item == last.output[event.output_index] and num_open == 1
            num_open = 0
        else:
            assert event.item_id == items[event.output_index].id
            if event.type.endswith(".delta"):
                texts[event.output_index] += event.delta
            elif event.type.endswith(("text.done", "arguments.done")):
                told = event.arguments if event.type.endswith("arguments.done") else event.text
                assert told == texts[event.output_index]
            else:
                assert event.type in ("response.content_part.added", "response.content_part.done")
                assert event.part.text == (texts[event.output_index] if event.type.endswith("done") else "")
    assert num_open == 0 and [item.type for item in items.values()] == [item.type for item in last.output]
    return last


def test_events_tell_of_a_text(server: ChatServer) -> None:
    events = events_of(server, include=["message.output_text.logprobs"], top_logprobs=2)
    assert events[-1].type == "response.incomplete"
    last = check_events(events)
    whole = ask(server, include=["message.output_text.logprobs"], top_logprobs=2)
    assert without_ids(last.model_dump()["output"]) == without_ids(whole.model_dump()["output"])
    assert last.usage == whole.usage
    scores = last.output[0].content[0].logprobs
    assert len(scores) == 12 and all(len(score.top_logprobs) == 2 for score in scores)


@pytest.mark.parametrize(
    ("template", "choice"),
    [
        (templates.QWEN3, "required"),
        (templates.QWEN3, {"type": "function", "name": "weather"}),
        (templates.KIMI, "required"),
    ],
)
def test_a_tool_is_called_and_its_output_goes_back(server: ChatServer, template: str, choice: Any) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"max_output_tokens": 200, "extra_body": {"seed": 3, "logit_bias": CLOSE_THOUGHTS}}
    answer = ask(server, template, **asked)
    call = answer.output[-1]
    assert (call.type, call.name, call.status, answer.status) == ("function_call", "weather", "completed", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome") and call.call_id != call.id
    assert call.call_id.startswith("functions.weather:") == (template == templates.KIMI)
    events = events_of(server, template, **asked)
    assert events[-1].type == "response.completed"
    last = check_events(events)
    assert without_ids(last.model_dump()["output"]) == without_ids(answer.model_dump()["output"])
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.done") == 1
    behind = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *answer.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    last = ask(server, template, input=behind, tools=[TOOL])
    assert last.usage.input_tokens > answer.usage.input_tokens


def test_thoughts_are_items_of_their_own(server: ChatServer) -> None:
    events = events_of(server, templates.DEEPSEEK)
    last = check_events(events)
    (item,) = last.output
    assert item.type == "reasoning" and item.content[0].type == "reasoning_text" and item.content[0].text
    assert last.usage.output_tokens_details.reasoning_tokens > 0 and last.output_text == ""
    whole = ask(server, templates.DEEPSEEK)
    assert without_ids(whole.model_dump()["output"]) == without_ids(last.model_dump()["output"])


def test_the_clients_own_helpers_work(server: ChatServer) -> None:
    asked: dict[str, Any] = {**ASKED, "temperature": 0, "max_output_tokens": 800}
    tools = [openai.pydantic_function_tool(Weather)["function"]]
    tools = [{"type": "function", **tool} for tool in tools]

    async def work(client: openai.AsyncOpenAI) -> tuple[Any, Any, Any]:
        parsed = await client.responses.parse(**asked, text_format=Weather)
        called = await client.responses.parse(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
        async with client.responses.stream(**asked, text_format=Weather) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds
        forced: dict[str, Any] = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        async with client.responses.stream(**forced) as stream:
            snapshots = [event.snapshot async for event in stream if event.type.endswith("arguments.delta")]
            (call,) = (await stream.get_final_response()).output
        assert call.type == "function_call" and snapshots[-1] == call.arguments == called.output[0].arguments
        return parsed, called, final

    parsed, called, final = server.ask(templates.HERMES, work)
    assert isinstance(parsed.output_parsed, Weather) and final.output_parsed == parsed.output_parsed
    assert Weather.model_validate(called.output[0].parsed_arguments)


def test_what_langchain_sends_is_answered(server: ChatServer) -> None:
    """Its request with use_responses_api and bound tools, and the input of the turn behind it, written down from it."""
    body: dict[str, Any] = {
        "model": "chat", "stream": False, "tools": [TOOL], "max_output_tokens": 200, "tool_choice": "required",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
    }  # fmt: skip
    answer = server.ask(templates.HERMES, lambda client: client.responses.create(**body))
    call = answer.output[0].model_dump(exclude_none=True)
    body["input"] = [
        *body["input"],
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": []},
        ]},
        {**call, "status": "completed"},
        {"type": "function_call_output", "output": "sunny", "call_id": call["call_id"]},
    ]  # fmt: skip
    body |= {"tool_choice": "auto", "max_output_tokens": 4, "text": {"format": {"type": "text"}}}
    answer = server.ask(templates.HERMES, lambda client: client.responses.create(**body))
    assert answer.status in ("incomplete", "completed") and answer.usage.output_tokens > 0


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc", "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
    ]

    def call(number: str, name: str) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert read_items("be brief", items).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "why",
            "tool_calls": [call("1", "f"), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]
    assert read_items(None, "x") == ([{"role": "user", "content": "x"}], [])


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "input is missing", "input"),
    ({"input": []}, "input must be a text, or a list", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: \"item_reference\" is not read here", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "this model reads text alone", "input"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].tool_calls[0].function.name", "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id is not supported here", "previous_response_id"),
    ({"conversation": "c"}, "conversation is not supported here", "conversation"),
    ({"background": True}, "background is not supported here: leave it out, or give false", "background"),
    ({"truncation": "auto"}, "truncation is not supported here", "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type must be function", "tools"),
    ({"tools": [{"type": "function", "name": "f", "parameter": {}}]}, "did you mean 'parameters'", "tools"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name must be a text", "tools"),
    ({"tools": False}, "tools must be a list of objects, not false", "tools"),
    ({"metadata": 5}, "metadata must be an object, not 5", "metadata"),
    ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice must be none, auto", "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens must be at least 1", "max_output_tokens"),
    ({"text": {"format": {"type": "json"}}}, "text.format.type must be text, json_object", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format must be an object with a", "text.format"),
    ({"include": ["file_search.results"]}, "is not there: leave it out", "include"),
    ({"messages": []}, 'unknown field "messages" of responses', "messages"),
    ({"max_output_token": 5}, "did you mean 'max_output_tokens'", "max_output_token"),
    ({"text": {"verbosity": "least"}}, "text.verbosity must be low, medium or high", "text"),
    ({"reasoning": {"efort": "low"}}, "did you mean 'effort'", "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort must be a text, not 5", "reasoning.effort"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "line", "field"), BAD)
def test_what_is_wrong_is_said_in_a_line(
    server: ChatServer, fields: dict[str, Any], line: str, field: str | None
) -> None:
    async def refused(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/responses", body={**ASKED, **fields}, cast_to=object)
        return caught.value.body

    error = server.ask(templates.HERMES, refused)
    assert line in error["message"] and "\n" not in error["message"] and error["param"] == field


def test_what_is_lost_on_its_way_is_told_in_the_last_event(server: ChatServer) -> None:
    """The schema leaves the end alone, which min_tokens forbids."""
    form = {"type": "json_schema", "name": "x", "schema": {**COMPACT, "const": {"a": 1}}}
    asked: dict[str, Any] = {"text": {"format": form}, "extra_body": {"min_tokens": 50}, "max_output_tokens": 60}
    events = events_of(server, **asked)
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    error = events[-1].response.error
    assert error is not None and "guide" in error.message and error.code
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.BadRequestError):
        ask(server, **asked)


def test_nothing_is_kept(server: ChatServer) -> None:
    async def refused(client: openai.AsyncOpenAI) -> str:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve("resp_1")
        return str(caught.value)

    assert "responses are not kept here" in server.ask(templates.HERMES, refused)


def test_every_parameter_of_openais_own_client_is_known() -> None:
    names = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert len(names) > 25 and names <= RESPONSE_FIELDS.keys()
    with pytest.raises(Refusal, match='there is no model "other"'):
        read_response({"model": "other", "input": "x"}, "chat")
