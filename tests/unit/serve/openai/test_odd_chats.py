"""Chats with tools, responses and messages, in which something is wrong: each is read, or refused in one line."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import templates
from chat_server import MARKS
from checkpoints import make_tokenizer

from launch.serve.application.request_parser import RequestParser
from launch.serve.parsing.messages import Facts, Read, Refused, Reply, Task, pack
from trtrun.tokens.text import read_tokenizer

Steps = tuple[str | int, ...]
FORMS = [
    ("QWEN3", "hermes", "qwen3"),
    ("LLAMA", "llama3_json", ""),
    ("HARMONY", "gpt-oss", "gpt-oss"),
    ("PLAIN", "", ""),
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "$defs": {"x": {"enum": ["p", "q"]}},
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"name": {}}}}},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "tool_search_call", "call_id": "3", "arguments": {"q": "x"}},
        {"type": "tool_search_output", "call_id": "3", "tools": [{"type": "custom", "name": "h"}]},
        {"type": "local_shell_call", "id": "4", "action": {"type": "exec", "command": ["ls"]}},
    ],
    "instructions": "be brief",
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
}

MESSAGE: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "o"}]},
                {"type": "text", "text": "y"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
}
OF_CHATS = ("tool_calls", "function", "response_format", "reasoning_effort", "continue_final_message", "parameters")
"""Words that messages lack."""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


ODD = [
    None, True, 0, -1, 1.5, float("nan"), 2**70, "", "x", "\ud800", "<tool_call>", "</think>", "{", [], {}, [1],
    {"a": 1}, {"type": "object"}, nested(60), nested(250), {"$ref": "#/$defs/a"}, {"type": "string", "pattern": "("},
    [{}], [{"type": "text", "text": "\ud800"}], {"\ud800": 1},
]  # fmt: skip


def paths(value: Any, path: Steps = ()) -> Iterator[Steps]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from paths(item, (*path, key))


def changed(body: Any, path: Steps, value: Any) -> Any:
    if not path:
        return value
    found = body = copy.deepcopy(body)
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    return body


def make_parsers(folder: Path) -> list[RequestParser]:
    """One for each of the forms."""
    make_tokenizer(folder, special=MARKS)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return [
        RequestParser(
            Facts(
                tokenizer=None, template=getattr(templates, family), template_tokens={}, model_name="m",
                vocab_size=tokenizer.vocab_size, eos_token_ids=(0,), draft_len=4, excludes_prompt=None,
                max_batch_size=8, tool_format=tools, reasoning_format=reasoning,
            ),
            tokenizer,
        )
        for family, tools, reasoning in FORMS
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), [("chat", CHAT), ("response", RESPONSE), ("message", MESSAGE)])
@pytest.mark.parametrize("choice", ["as it is", "auto"])
def test_what_is_odd_is_read_or_refused_in_a_line(
    kind: str, body: dict[str, Any], choice: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parsers = make_parsers(tmp_path_factory.mktemp("tokenizer"))
    auto = {"type": "auto"} if kind == "message" else "auto"
    body = body if choice == "as it is" else {**body, "tool_choice": auto}
    draw, counts = random.Random(7), {Read: 0, Refused: 0}
    for path in paths(body):
        for value in draw.sample(ODD, 6):
            raw = json.dumps(changed(body, path, value)).encode()
            result, blocks = draw.choice(parsers).read(Task(kind=kind, seconds=1.0, most_tokens=1 << 20), raw)
            pack(Reply(result=result, sizes=tuple(map(len, blocks))))  # it can travel
            assert isinstance(result, Read | Refused)
            counts[type(result)] += 1
            if isinstance(result, Refused):
                assert result.kind == "INVALID" and "\n" not in result.reason and len(result.reason) < 2000, path
                assert kind != "message" or not any(word in result.reason for word in OF_CHATS), result.reason
    assert counts[Read] > 20 and counts[Refused] > 100


@pytest.mark.parametrize("depth", [200, 400, 480, 5000])
def test_schemas_that_are_nested_deeply_are_refused_in_a_line(depth: int, tmp_path: Path) -> None:
    """By whoever cannot follow them first: the grammar engine, Python, or its reader of JSON."""
    schema = '{"anyOf":[' * depth + '{"type":"object"}' + "]}" * depth
    raw = (
        '{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        f'{{"name": "f", "strict": true, "parameters": {schema}}}}}], "response_format": {{"type": "json_schema", '
        f'"json_schema": {{"name": "s", "schema": {schema}}}}}}}'
    )
    for reader in make_parsers(tmp_path):
        result, _ = reader.read(Task(kind="chat", seconds=1.0, most_tokens=1 << 20), raw.encode())
        assert isinstance(result, Refused) and result.kind == "INVALID"
        assert "\n" not in result.reason and len(result.reason) < 500
        assert any(word in result.reason for word in ("too deeply", "recursion limit", "cannot be followed"))
