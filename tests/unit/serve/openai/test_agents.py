"""What Codex asks of /v1/responses, written down from it without its texts: tools of its kinds, their calls, whole and
in events, and the way back of both; and messages in the order in which agents send them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import templates
from chat_server import ChatServer

from launch.serve.admission.refusals import Refusal
from launch.serve.api.openai.calls import CallItem
from launch.serve.api.openai.output.machine import Arguments, CallBegin
from launch.serve.api.openai.responses.items import read_items
from launch.serve.api.openai.responses.output import CustomInput, OutputItems
from launch.serve.api.openai.responses.requests import read_response
from trtrun.chats.chat_template import ChatTemplate
from trtrun.chats.messages import NO_TEXT
from trtrun.errors import InvalidRequestError

pytestmark = pytest.mark.timeout(240)
EXACT = {"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False, "type": "object"}
ASKED = {**EXACT, "properties": {"query": {"enum": ["cats", "dogs"]}}, "required": ["query"]}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF\n%import common.LF'}
TOOLS: list[Any] = [
    {"type": "function", "name": "exec_command", "strict": False, "parameters": ASKED},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
    {"type": "custom", "name": "letter", "format": {"type": "grammar", "syntax": "regex", "definition": '[ab"]{3}\n'}},
    {"type": "namespace", "name": "mcp__words", "description": "Words.", "tools": [
        {"type": "function", "name": "look_up", "strict": False, "parameters": ASKED, "defer_loading": True},
        {"type": "custom", "name": "note"},
    ]},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": ASKED},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation"},
]  # fmt: skip
TURN: dict[str, Any] = {
    "model": "chat",
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "message", "id": "msg_4", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"thread_id": "1"},
    "text": {"verbosity": "low"},
}


def events_of(server: ChatServer, **fields: Any) -> list[Any]:
    body: dict[str, Any] = {"stream": True, "extra_body": {**TURN, "seed": 3, "max_output_tokens": 300, **fields}}

    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(**body)]

    return server.ask(templates.HERMES, read)


def test_a_turn_of_codex_is_answered(server: ChatServer) -> None:
    last = events_of(server, max_output_tokens=8)[-1].response
    assert last.status in ("completed", "incomplete") and last.store is False
    assert [tool.type for tool in last.tools] == [tool["type"] for tool in TOOLS[:-2]]


@pytest.mark.parametrize(
    ("choice", "kind", "name"),
    [
        ({"type": "custom", "name": "letter"}, "custom_tool_call", "letter"),
        ({"type": "function", "name": "look_up", "namespace": "mcp__words"}, "function_call", "look_up"),
        ({"type": "tool_search"}, "tool_search_call", None),
    ],
)
def test_calls_come_back_as_items_of_their_kind(server: ChatServer, choice: Any, kind: str, name: str | None) -> None:
    events = events_of(server, tool_choice=choice)
    (item,) = events[-1].response.output
    assert (item.type, getattr(item, "name", None), item.status) == (kind, name, "completed") and item.call_id
    names = [event.type for event in events]
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 1
    deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
    if kind == "custom_tool_call":
        done = events[names.index("response.custom_tool_call_input.done")]
        assert deltas == item.input == done.input and set(deltas.removesuffix("\n")) <= set('ab"')
        assert "response.function_call_arguments.delta" not in names
    elif kind == "function_call":
        assert item.namespace == "mcp__words" and json.loads(deltas) == json.loads(item.arguments)
    else:
        assert deltas == "" and item.arguments["query"] in ("cats", "dogs")


def test_a_clients_shell_and_search_have_objects_as_arguments() -> None:
    kinds = {name: CallItem(name, name) for name in ("local_shell", "tool_search")}
    action = {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 9}
    for name, arguments, key, told in (
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 9, "working_directory": 5}, "action", action),
        ("local_shell", {"command": "ls"}, "action", {"type": "exec", "env": {}, "command": []}),
        ("tool_search", ["x"], "arguments", {"INVALID_JSON": '["x"]'}),
    ):
        items = OutputItems(lambda: "1", kinds)
        events = [items.take(CallBegin(name)), items.take(Arguments(json.dumps(arguments))), items.close()]
        assert [len(told) for told in events] == [1, 0, 1] and events[2][0]["item"] == items.items[0]
        assert (items.items[0]["type"], items.items[0][key]) == (f"{name}_call", told)


def test_calls_of_every_kind_go_back() -> None:
    found = [{"type": "function", "name": "later", "parameters": ASKED}]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "+é\n", "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "look_up", "namespace": "mcp__words", "arguments": "{}"},
        {"type": "local_shell_call", "id": "3", "status": "completed", "action": {
            "type": "exec", "command": ["ls"], "env": {}, "working_directory": None,
        }},
        {"type": "tool_search_call", "call_id": "4", "execution": "client", "arguments": {"query": "x"}},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "see"}, image]},
        {"type": "local_shell_call_output", "id": "3", "output": "file"},
        {"type": "tool_search_output", "call_id": "4", "execution": "client", "status": "completed", "tools": found},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
    ]  # fmt: skip
    messages, tools = read_items(None, items)
    assert messages[0]["content"][1]["text"] == NO_TEXT
    calls = [call["function"] for call in messages[1]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("apply_patch", {"input": "+é\n"}),
        ("mcp__words__look_up", {}),
        ("local_shell", {"command": ["ls"]}),
        ("tool_search", {"query": "x"}),
    ]
    outputs = [(message["tool_call_id"], message["content"]) for message in messages[2:]]
    assert outputs == [("1", "done"), ("2", f"see\n{NO_TEXT}"), ("3", "file"), ("4", json.dumps({"tools": found}))]
    assert tools == [("input[9].tools[0]", found[0]), ("input[11].tools[0]", {"type": "custom", "name": "more"})]
    call = read_response({**TURN, "input": items}, "chat")
    assert call.tools is not None and [tool.name for tool in call.tools.tools][-2:] == ["later", "more"]
    with pytest.raises(Refusal, match="this model reads text alone"):
        read_items(None, [{"role": "assistant", "content": "x"}, {"role": "user", "content": [image]}])


def test_tools_are_shown_as_functions_and_named_at_their_places() -> None:
    call = read_response(TURN, "chat")
    assert call.tools is not None
    shown = {tool.name: tool.shown["function"] for tool in call.tools.tools}
    names = ["exec_command", "apply_patch", "letter", "mcp__words__look_up", "mcp__words__note", "tool_search"]
    assert list(shown) == [*names, "local_shell"]
    assert PATCH["definition"] in shown["apply_patch"]["description"]
    assert shown["letter"]["parameters"]["properties"]["input"]["pattern"] == '^(?:[ab"]{3}\n)$'
    # By its own name, too, as descriptions have it.
    assert call.answering.call_items["look_up"] == ("function", "look_up", "mcp__words")
    assert read_response({**TURN, "tools": [{"type": "namespace", "name": "n", "tools": []}]}, "chat").tools is None
    bad = {"type": "function", "name": "f", "parameters": {"type": "array"}}
    spaces = {"type": "namespace", "name": "n", "description": "", "tools": [TOOLS[0], bad]}
    for tools, line in (
        ([TOOLS[-1], bad], r"^tools\[1\]\.parameters: its type must"),
        ([TOOLS[-1], spaces], r"^tools\[1\]\.tools\[1\]\.parameters: its type must"),
        ([TOOLS[-1]], r"^tools\[0\]\.type must be function, custom or namespace, not \"image_generation\""),
        ([{"type": "mcp"}], r"^tools\[0\]\.type must be function"),
        ([{"type": "custom", "name": "x", "format": {"type": "json"}}], r"^tools\[0\]\.format must be"),
        ([{"type": "namespace", "name": "n", "tools": [TOOLS[5]]}], r"^tools\[0\]\.tools\[0\]\.type must be"),
    ):
        with pytest.raises(Refusal, match=line):
            read_response({**TURN, "tools": tools}, "chat")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n+\\"\\u00e9\\ud83d\\ude00\\\\ é"}', '*** Begin\n+"é😀\\ é'),
        ('\n{ "input" :"raw\nbreak", "more": 1}', "raw\nbreak"),
        ('{"patch": "x\\ny"}', "x\ny"),
        ('"x"', "x"),
        ("[1]", "[1]"),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "half \\ud83d."}', 'half \\ud83d."}'),
        ('{"input": ""}', ""),
        ("", ""),
    ],
)
def test_the_text_of_a_custom_call_is_told_as_it_comes(arguments: str, text: str) -> None:
    for size in (1, 5, len(arguments) + 1):
        told = CustomInput()
        parts = [told.feed(arguments[place : place + size]) for place in range(0, len(arguments), size)]
        assert "".join(parts) + told.finish() == text
    if text.startswith("***"):
        assert "".join(parts) == text  # before the end


def test_turns_are_joined_where_a_template_takes_them_only_so() -> None:
    """As Qwen3.5's, which takes a system message at the beginning alone, and Mistral's, which wants turns by turns."""
    strict = ChatTemplate(
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{% if message.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "[{{ message.role }}: {{ message.content }}]{% endfor %}",
        {},
    )
    roles = ("developer", "system", "user", "system", "user", "assistant", "system")
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    assert strict.render(messages) == "[system: 0\n\n1][user: 2\n\n3\n\n4][assistant: 5][user: 6]"
    free = ChatTemplate("{% for message in messages %}[{{ message.role }}]{% endfor %}", {})
    assert free.render(messages[1:4]) == "[system][user][system]"
    with pytest.raises(InvalidRequestError, match="no system here"):
        ChatTemplate("{{ raise_exception('no system here') }}", {}).render(messages)
