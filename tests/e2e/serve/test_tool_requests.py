"""Tools and responses through a real server, by OpenAI's own client: calls, streams of them, and what was thought."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from servers import PATIENCE, Server

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)
MESSAGES: list[Any] = [{"role": "user", "content": "write a record"}]
SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "record", "parameters": SCHEMA, "strict": True}}]
CALL = '<tool_call>\n{"name": "record", "arguments": {"kind":"cat","age":3}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 60}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
        yield client


def test_a_call_that_is_wanted_is_guided_and_streams_are_whole_answers(client: openai.OpenAI, llm: LLM) -> None:
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        asked: dict[str, Any] = {**ASKED, **options, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = client.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "record"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        told = [delta.tool_calls[0] for choice in deltas if (delta := choice.delta).tool_calls]
        assert told[0].function is not None and told[0].function.name == "record" and told[0].id
        assert "".join(one.function.arguments or "" for one in told if one.function) == call.function.arguments
        assert deltas[-1].finish_reason == "tool_calls"
        # The text is what plain guided decoding writes behind the same prompt.
        shown = {"type": "function", "function": {"name": "record", "parameters": SCHEMA}}
        prompt = f"# tools\n{json.dumps([shown])}\n# user\nwrite a record\n# answer\n"
        opening, closing = map(json.dumps, CALL.split('{"kind":"cat","age":3}'))
        grammar = f"%llguidance {{}}\nstart: {opening} arguments {closing}\narguments: %json {json.dumps(SCHEMA)}\n"
        sampling = SamplingParams(**{"max_tokens": 60, "guided": {"grammar": grammar}, "draft_len": 0, **options})
        (plain,) = llm.generate([prompt], sampling)[0].completions
        assert plain.text == CALL.replace('{"kind":"cat","age":3}', call.function.arguments)


def test_what_the_model_writes_is_read_and_goes_back(client: openai.OpenAI) -> None:
    written = {"guided_grammar": f"start: {json.dumps(f'So: {CALL}')}"}
    answer = client.chat.completions.create(**ASKED, temperature=0, extra_body=written)
    message = answer.choices[0].message
    assert message.content == "So:" and message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"kind":"cat","age":3}'  # type: ignore[union-attr]
    behind = [*MESSAGES, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "kept"}]
    last = client.chat.completions.create(**{**ASKED, "messages": behind, "tool_choice": "none", "max_tokens": 4})
    assert last.choices[0].message.tool_calls is None and last.choices[0].finish_reason in ("length", "stop")
    assert last.usage is not None and answer.usage is not None
    assert last.usage.prompt_tokens > answer.usage.prompt_tokens


def test_responses_come_whole_and_in_events(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "pair", "input": "write a record", "temperature": 0, "max_output_tokens": 60}
    tool = {"type": "function", **TOOLS[0]["function"]}
    answer = client.responses.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (item,) = answer.output
    assert item.type == "function_call" and answer.status == "completed"
    jsonschema.validate(json.loads(item.arguments), SCHEMA)
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        # What is cut is told to be incomplete, of which the helper makes no final response.
    chat = client.chat.completions.create(
        model="pair", messages=[{"role": "user", "content": "write a record"}], temperature=0, max_tokens=60
    )
    assert text == chat.choices[0].message.content


def test_messages_are_chats_in_anthropics_words(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    chat = client.chat.completions.create(**asked)
    message = server.post("/v1/messages", asked).json()
    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    events = server.post("/v1/messages", {**asked, "stream": True}).text.split("\n\n")
    deltas = [json.loads(event.split("data: ")[1])["delta"] for event in events if "content_block_delta" in event]
    assert "".join(delta["text"] for delta in deltas) == message["content"][0]["text"]
    tool = {"name": "record", "input_schema": SCHEMA}
    called = server.post("/v1/messages", {**asked, "tools": [tool], "tool_choice": {"type": "any"}}).json()
    assert called["content"][0]["type"] == "tool_use" and called["usage"]["output_tokens"] > 0
    counted = server.post("/v1/messages/count_tokens", {"messages": MESSAGES}).json()
    assert chat.usage is not None and counted == {"input_tokens": chat.usage.prompt_tokens}


def test_a_custom_tool_is_called_in_events_and_goes_back(client: openai.OpenAI) -> None:
    """As Codex has it, which also offers what there is not, and sends what concerns itself."""
    form = {"type": "grammar", "syntax": "regex", "definition": "[+-][ab]{3}"}
    tools: list[Any] = [{"type": "custom", "name": "apply_patch", "format": form}, {"type": "web_search"}]
    items: list[Any] = [{"role": "user", "content": "write a record"}]
    asked: dict[str, Any] = {"model": "pair", "tools": tools, "temperature": 0, "max_output_tokens": 200}
    asked |= {"reasoning": {"effort": "high", "summary": "auto"}, "extra_body": {"client_metadata": {"a": "b"}}}
    choice: Any = {"type": "custom", "name": "apply_patch"}
    events = [*client.responses.create(**asked, input=items, tool_choice=choice, stream=True)]
    assert events[-1].type == "response.completed"
    (call,) = events[-1].response.output
    assert call.type == "custom_tool_call" and re.fullmatch("[+-][ab]{3}", call.input)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    last = client.responses.create(**{**asked, "max_output_tokens": 4}, input=[*items, call, output])
    assert last.usage is not None and events[-1].response.usage is not None
    assert last.usage.input_tokens > events[-1].response.usage.input_tokens


def test_what_is_wrong_ends_no_server(server: Server) -> None:
    for body in ({"input": "x", "background": True}, {"input": [{"type": "x"}]}, {}):
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"], answer.text
    assert not [line for line in server.lines if "Traceback" in line]
