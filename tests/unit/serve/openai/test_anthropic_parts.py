"""Parts of /v1/messages by themselves: turns as messages of a chat, blocks and their events, keys."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from message_events import put_together
from starlette.requests import Request

from launch.serve.admission.refusals import Refusal
from launch.serve.api.anthropic.api import Blocks
from launch.serve.api.anthropic.conversations import read_conversation
from launch.serve.api.anthropic.requests import read_message
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Reasoning, Text, joined
from launch.serve.http.requests import Keys
from trtrun.chats.messages import NO_TEXT


def test_turns_become_the_messages_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "ctx", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "why", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look.", "citations": None},
            call,
            {**call, "id": "2"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": True},
            {"type": "tool_result", "tool_use_id": "2"},
            {"type": "text", "text": "go on"},
        ]},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": [{"type": "text", "text": " it"}, {"type": "text", "text": " is"}]},
    ]  # fmt: skip

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    called = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert read_conversation(None, turns) == (
        [
            {"role": "user", "content": parts("a", "b", "c")},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "why",
                "tool_calls": [{"id": "1", **called}, {"id": "2", **called}],
            },
            {"role": "tool", "tool_call_id": "1", "content": parts("x")},
            {"role": "tool", "tool_call_id": "2", "content": []},
            {"role": "user", "content": parts("go on")},
            {"role": "system", "content": parts("be brief")},
            {"role": "assistant", "content": "So it is"},
        ],
        True,
    )


def test_what_is_no_text_has_a_note_where_nobody_can_take_it_back() -> None:
    """As Claude Code sends them: an image that its Read has found, and a file beside what it says of one."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    file = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    found = [
        image,
        {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
        {"type": "document", "title": "d", "source": {"type": "text", "media_type": "text/plain", "data": "y"}},
        {"type": "tool_reference", "tool_name": "f"},
    ]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": "see"}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "I look.", "citations": [{"type": "web_search_result_location"}]},
            {"type": "tool_use", "id": "1", "name": "Read", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": found}, file]},
        {"role": "system", "content": "go on"},
    ]  # fmt: skip
    first, answer, result, beside, _ = read_conversation(None, turns).messages
    assert [part["text"] for part in first["content"]] == [NO_TEXT, "see"] and answer["content"] == "I look."
    texts = [part["text"] for part in result["content"]]
    assert texts == [NO_TEXT, "t (s)\nx", "d\ny", 'The tool "f" may be called.']
    assert beside == {"role": "user", "content": [{"type": "text", "text": NO_TEXT}]}
    with pytest.raises(Refusal, match=r"^messages\[4\]\.content\[0\]\.type: .* this model reads text alone"):
        read_conversation(None, [*turns, {"role": "user", "content": [image]}])


def test_tools_that_are_run_elsewhere_are_left_out_beside_others() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [search, tool]}
    call = read_message(body, "chat")
    assert call.tools is not None
    (shown,) = call.tools.shown
    assert shown["function"]["parameters"]["examples"] == [{"a": 1}]
    for changed, line in (
        ({"tools": [search]}, r"^tools\[0\]\.type: \"web_search_20250305\" is not run here"),
        ({"tools": [search, {**tool, "name": ""}]}, r"^tools\[1\]\.name must be a text"),
        ({"tool_choice": {"type": "tool", "name": "web_search"}}, "which is not among the tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "give tools of your own, with an input_schema"),
    ):
        with pytest.raises(Refusal, match=line):
            read_message({**body, **changed}, "chat")


def test_events_tell_of_one_block_after_the_other() -> None:
    blocks, ids = Blocks(lambda: next(ids)), iter("12")
    found = [
        Reasoning("so"), Reasoning("."), Text("a"), Text("b"), CallBegin("f"), Arguments('{"a"'), Arguments(": 1}"),
        CallBegin("g"), Text("c"),
    ]  # fmt: skip
    usage = {"output_tokens": 0}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"content": [], "stop_reason": None, "usage": usage}},
        *(event for part in found for event in blocks.take(part)),
        *blocks.close(),
        {"type": "message_delta", "delta": {}, "usage": {}},
        {"type": "message_stop"},
    ]
    content = [
        {"type": "thinking", "thinking": "so.", "signature": ""},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        {"type": "text", "text": "c"},
    ]
    assert json.loads(msgspec.json.encode(blocks.blocks)) == content == put_together(events)["content"]


def test_arguments_are_an_object_as_they_are_written() -> None:
    for written, found in (
        ("", {}),
        ('{"a": 1e400}', {"a": float("inf")}),
        ('{"a": 1.10}', {"a": 1.1}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ):
        blocks = Blocks(lambda: "1")
        for event in joined([CallBegin("f"), Arguments(written)]):
            blocks.take(event)
        blocks.close()
        assert json.loads(msgspec.json.encode(blocks.blocks))[0]["input"] == found


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    def check(**headers: str) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        Keys(["secret"]).check(Request({"type": "http", "headers": raw}))

    check(x_api_key="secret")
    check(authorization="Bearer secret", x_api_key="-")
    check(authorization="Bearer -", x_api_key="secret")
    for wrong in ({}, {"x_api_key": "-"}, {"x_api_key": ""}, {"authorization": "Bearer -"}):
        with pytest.raises(Refusal, match="wants an API key"):
            check(**wrong)
