"""/v1/messages and its count_tokens as Anthropic's client asks them, on a made-up checkpoint: bodies and headers as it
sends them, events put together as it does."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest
import templates
from chat_server import MARKS, ChatServer
from message_events import put_together
from tool_chats import CITY, COMPACT

from launch.serve.admission.refusals import Refusal
from launch.serve.api.anthropic.requests import read_message

pytestmark = pytest.mark.timeout(240)
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "-", "anthropic-beta": "claude-code-20250219"}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "chat", "max_tokens": 12, "messages": [USER], "temperature": 1.0, "seed": 3}
TOOL: dict[str, Any] = {"name": "weather", "description": "of a city", "input_schema": CITY}
CLOSE_THOUGHTS = {str(1 + MARKS.index("<think>")): 20.0, str(1 + MARKS.index("</think>")): 100.0}
FORCED: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "logit_bias": CLOSE_THOUGHTS}


def post(
    server: ChatServer, body: Any, template: str = templates.HERMES, path: str = "/v1/messages", **section: Any
) -> httpx.Response:
    async def do() -> httpx.Response:
        transport = httpx.ASGITransport(server.application(template, **section))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=HEADERS) as client:
            return await client.post(path, json=body, params={"beta": "true"})

    return server.run(do())


def ask(server: ChatServer, template: str = templates.HERMES, **fields: Any) -> dict[str, Any]:
    answer = post(server, {**ASKED, **fields}, template)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def chat(server: ChatServer, messages: list[Any], template: str = templates.HERMES, **fields: Any) -> Any:
    asked = {"temperature": 1.0, "max_tokens": 12, "seed": 3, **fields}
    return server.ask(template, lambda client: client.chat.completions.create(model="chat", messages=messages, **asked))


def events_of(server: ChatServer, template: str = templates.HERMES, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, {**ASKED, **fields, "stream": True}, template)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for written in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is drawn for each answer, or depends on what the cache holds."""
    usage = message["usage"]
    usage["input_tokens"] += usage["cache_read_input_tokens"]
    usage["cache_read_input_tokens"] = 0
    content = [{key: item for key, item in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_text_is_answered_as_a_chat_is(server: ChatServer) -> None:
    ignored = {"service_tier": "auto", "fallbacks": "default", "diagnostics": {"previous_message_id": None}}
    told = ask(server, metadata={"user_id": "me"}, thinking={"type": "adaptive"}, **ignored)
    found = chat(server, [USER])
    (choice,) = found.choices
    assert told["content"] == [{"type": "text", "text": choice.message.content}]
    assert (told["type"], told["role"], told["model"], told["id"][:4]) == ("message", "assistant", "chat", "msg_")
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found.usage.prompt_tokens
    assert usage["output_tokens"] == 12 and usage["input_tokens"] > 0
    plain = ask(server, draft_len=0)
    assert without_ids(plain) == without_ids(told)
    events = events_of(server)
    assert len([event for event in events if event["type"] == "content_block_delta"]) > 1
    assert without_ids(put_together(events)) == without_ids(told)


def test_a_system_prompt_is_the_first_message(server: ChatServer) -> None:
    bill = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    brief = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    whole = chat(server, [{"role": "system", "content": "be brief"}, USER])
    for system in ("be brief", [bill, brief]):
        told = ask(server, system=system)
        assert told["content"][0]["text"] == whole.choices[0].message.content


def test_what_a_stop_sequence_ends_says_which(server: ChatServer) -> None:
    text = ask(server, max_tokens=40)["content"][0]["text"]
    stop = text[10:13]
    before = text[: text.index(stop)]
    asked = {"max_tokens": 40, "stop_sequences": ["never in it", stop[1:], stop]}
    told = ask(server, **asked)
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert told["content"] == [{"type": "text", "text": before}]
    assert without_ids(put_together(events_of(server, **asked))) == without_ids(told)


@pytest.mark.parametrize("template", [templates.QWEN3, templates.LLAMA, templates.MISTRAL, templates.KIMI])
@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_tool_is_called_and_its_result_goes_back(server: ChatServer, template: str, choice: Any) -> None:
    asked = {**FORCED, "tool_choice": choice}
    told = ask(server, template, **asked)
    call = told["content"][-1]
    assert (call["type"], call["name"], told["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["city"] in ("Paris", "Rome")
    begins = {templates.MISTRAL: "", templates.KIMI: "functions.weather:"}.get(template, "toolu_")
    assert call["id"].startswith(begins) and (len(call["id"]) == 9 or template != templates.MISTRAL)
    assert without_ids(put_together(events_of(server, template, **asked))) == without_ids(told)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    behind = [USER, {"role": "assistant", "content": told["content"]}, {"role": "user", "content": [result]}]
    last = ask(server, template, messages=behind, tools=[TOOL])
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    chatted = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    shown = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
    found = chat(server, chatted, template, tools=[shown])
    usage = last["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found.usage.prompt_tokens


def test_arguments_that_are_no_object_are_told_as_text(server: ChatServer) -> None:
    asked: dict[str, Any] = {**FORCED, "tool_choice": {"type": "any"}, "stop_sequences": ['":"']}
    told = ask(server, **asked)
    assert (told["stop_reason"], told["content"][-1]["input"]) == ("stop_sequence", {"INVALID_JSON": '{"city'})


def test_thoughts_are_blocks_of_their_own(server: ChatServer) -> None:
    told = ask(server, templates.DEEPSEEK, thinking={"type": "enabled", "budget_tokens": 1024})
    (block,) = told["content"]
    assert block["type"] == "thinking" and block["thinking"] and block["signature"] == ""
    assert without_ids(put_together(events_of(server, templates.DEEPSEEK))) == without_ids(told)
    hidden = ask(server, templates.DEEPSEEK, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert hidden["content"] == [] and hidden["usage"]["output_tokens"] == 12


def test_an_answer_goes_on_with_the_assistants_last_words(server: ChatServer) -> None:
    begun = [USER, {"role": "assistant", "content": "So "}]
    found = chat(server, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    told = ask(server, messages=begun)
    assert told["content"][0]["text"] == found.choices[0].message.content


def test_tokens_are_counted_as_they_are_read(server: ChatServer) -> None:
    body = {"model": "chat", "messages": [USER], "system": "be brief", "tools": [TOOL], "tool_choice": {"type": "auto"}}
    counted = post(server, body, path="/v1/messages/count_tokens")
    usage = ask(server, **body)["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    refused = post(server, {**body, "tools": [{}]}, path="/v1/messages/count_tokens")
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("tools[0].input_schema")


def count(server: ChatServer, template: str, **fields: Any) -> int:
    body = {"model": "chat", "messages": [USER], **fields}
    number: int = post(server, body, template, "/v1/messages/count_tokens").json()["input_tokens"]
    return number


def test_templates_are_told_of_thinking_and_effort(server: ChatServer) -> None:
    as_it_is = count(server, templates.QWEN3)
    assert count(server, templates.QWEN3, thinking={"type": "disabled"}) > as_it_is
    assert count(server, templates.QWEN3, thinking={"type": "enabled", "budget_tokens": 1024}) == as_it_is
    effort = templates.PLAIN + "{{ reasoning_effort or '' }}"
    for asked, told in (("low", "low"), ("max", "high")):
        number = count(server, effort, output_config={"effort": asked})
        assert number == count(server, templates.PLAIN + told)
    assert count(server, templates.PLAIN, output_config={"effort": "low"}) == count(server, templates.PLAIN)


def test_a_text_may_have_a_schema(server: ChatServer) -> None:
    form = {"type": "json_schema", "schema": CITY}
    texts = []
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        told = ask(server, max_tokens=100, **fields)
        texts.append(told["content"][0]["text"])
        assert told["stop_reason"] == "end_turn" and json.loads(texts[-1])["city"] in ("Paris", "Rome")
    assert texts[0] == texts[1]


def test_what_claude_code_sends_is_answered(server: ChatServer) -> None:
    """A turn of its, written down from it, without its texts."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "chat",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "hi", **cached}],
            }
        ],
        "system": [{"type": "text", "text": "You are Claude Code", **cached}],
        "tools": [
            {**TOOL, "eager_input_streaming": True, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {**TOOL, "name": "Bash", "strict": True, "input_examples": [{"city": "Rome"}], **cached},
        ],
        "metadata": {"user_id": "user_1"},
        "inference_geo": "eu",
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    events = events_of(server, **{**body, "max_tokens": 8})
    assert put_together(events)["stop_reason"] in ("max_tokens", "end_turn")
    assert events[-2]["context_management"] == {"applied_edits": []}
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
    assert count(server, templates.HERMES, **counted) > count(server, templates.HERMES)
    searching = {"tools": [body["tools"][1]], "tool_choice": {"type": "tool", "name": "web_search"}}
    assert count(server, templates.HERMES, **searching) == count(server, templates.HERMES)
    with pytest.raises(Refusal):
        read_message({**body, "max_tokens": "x"}, "chat")
    assert read_message(body, "chat").answering.sampling.max_tokens == 32000


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is missing"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"messages": []}, "messages must be a list with one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user, assistant or system"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "did you mean 'content'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "this model reads text alone"),
    ({"messages": [{"role": "user", "content": [{"type": "txt"}]}]}, "is not read here (did you mean 'text'?)"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "cannot stand here: give text, document, search_result or tool_result",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": ""}]}]}, "did you mean 'text'"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ]
        },
        "the last one calls a tool: give its tool_result",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}]}, "input must be an object"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "is not run here"),
    ({"tools": [{"name": "f", "input_shema": {}}]}, "did you mean 'input_schema'"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name must be a text"),
    ({"tools": [{**TOOL, "input_examples": [5]}]}, "tools[0].input_examples must be a list of objects"),
    ({"tools": [{**TOOL, "strict": True, "input_schema": {"type": "?"}}]}, "tools[0].input_schema: "),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "wether"}}, "did you mean 'weather'"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice must be {"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": 0}},
        'must name a tool, as {"type": "tool", "name": "…"}',
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice must name a tool"),
    ({"stop_sequences": "x"}, "stop_sequences must be a list of texts"),
    ({"stop_sequences": ["x"] * 2000}, "stop_sequences "),
    ({"thinking": {"type": "on"}}, "thinking must be {"),
    ({"output_config": {"efort": "low"}}, "did you mean 'effort'"),
    ({"output_config": {"effort": "least"}}, "output_config.effort must be one of"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "?"}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
    ({"container": "c"}, "container is not supported here"),
    ({"compaction": {}}, "compaction is not supported here"),
    ({"max_token": 5}, "did you mean 'max_tokens'"),
    ({"top_p": 2}, "top_p must be"),
]


@pytest.mark.parametrize(("fields", "line"), BAD)
def test_what_is_wrong_is_said_in_a_line(server: ChatServer, fields: dict[str, Any], line: str) -> None:
    refused = post(server, {**ASKED, **fields})
    assert refused.status_code == 400, refused.text
    told = refused.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert line in told["error"]["message"] and "\n" not in told["error"]["message"]


def test_a_thread_is_refused_so_that_clients_do_without(server: ChatServer) -> None:
    """Anthropic's tool runner asks for one first, and looks for these details (anthropic 2.14)."""
    refused = post(server, {**ASKED, "thread": {"type": "create"}})
    assert refused.status_code == 400 and "thread is not supported here" in refused.json()["error"]["message"]
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.json()["error"]["details"] == details
    assert "details" not in post(server, {**ASKED, "container": "c"}).json()["error"]


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(server: ChatServer) -> None:
    refused = post(server, {**ASKED, "messages": [{"role": "user", "content": "x" * 20000}]})
    assert refused.json()["error"]["message"].startswith("prompt is too long: it has ")


def test_models_have_what_anthropics_client_reads(server: ChatServer) -> None:
    async def listed() -> Any:
        transport = httpx.ASGITransport(server.application(templates.HERMES))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=HEADERS) as client:
            return await client.get("/v1/models")

    answer = server.run(listed())
    assert len(answer.headers["request-id"]) == 32 and answer.headers["request-id"] == answer.headers["x-request-id"]
    told = answer.json()
    (model,) = told["data"]
    assert (told["first_id"], told["last_id"], told["has_more"]) == ("chat", "chat", False)
    assert (model["type"], model["display_name"]) == ("model", "chat")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


def test_errors_have_anthropics_shape(server: ChatServer) -> None:
    unknown = post(server, {**ASKED, "model": "claude-sonnet-4-5"})
    nowhere = post(server, {}, path="/v1/messages/batches")
    for answer in (unknown, nowhere):
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert 'this server has "chat"' in unknown.json()["error"]["message"]


def test_what_is_lost_on_its_way_is_told_in_the_last_event(server: ChatServer) -> None:
    """The schema leaves one text alone, and bad_words forbid that."""
    asked: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": {**COMPACT, "const": "a"}}}}
    events = events_of(server, **asked, bad_words=["a"])
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "invalid_request_error"
    assert post(server, {**ASKED, **asked, "bad_words": ["a"]}).status_code == 400


def test_silences_have_the_event_ping_where_the_server_says_so(server: ChatServer) -> None:
    quiet, pinging = (
        post(server, {**ASKED, "stream": True}, **section).text for section in ({}, {"ping_seconds": 1e-6})
    )
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'
    assert ping not in quiet and ping in pinging and ": ping\n\n" not in pinging.replace(ping, "")
