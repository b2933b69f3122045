"""What is wrong with tools, said in a line to OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import templates
from chat_server import ChatServer
from tool_chats import ASKED, STRICT, TOOLS

pytestmark = pytest.mark.timeout(240)

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {"a": 1}}, "tools must be a list", "tools"),
    ({"tools": [1]}, "tools[0] must be an object", "tools"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type must be function", "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object with a name", "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name must be", "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
        "unknown field \"parameter\" of tools[0].function (did you mean 'parameters'?)",
        "tools",
    ),
    ({"tools": [TOOLS[0], TOOLS[0]]}, 'tools[1]: there are two tools named "weather"', "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be none, auto, required, or an object", "tool_choice"),
    ({"tool_choice": "required"}, "there are no tools: give tools", "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wether"}}},
        "tool_choice names \"wether\", which is not among the tools (did you mean 'weather'?)",
        "tool_choice",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}},  # as /v1/responses has it
        'tool_choice must name a function, as {"type": "function", "function": {"name": "…"}}, not {"type"',
        "tool_choice",
    ),
    (
        {
            "tools": [
                TOOLS[1],
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}},
            ],
            "tool_choice": "required",
        },
        "tools[1].function.parameters: the JSON schema cannot be followed at /properties/a",
        "tools",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        'tools[0].function.parameters: its type must be "object", as arguments are one, not "array"',
        "tools",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"x-guidance": {"whitespace_pattern": "x"}}},
                }
            ]
        },
        "tools[0].function.parameters: x-guidance.whitespace_pattern must be a regular expression of blanks",
        "tools",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}},
                {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"not": {}}}},
            ],
            "tool_choice": "required",
        },
        'tools[1].function.parameters: the JSON schema cannot be followed at its root: Unimplemented keys: ["not"]',
        "tools",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_grammar": 'start: "x"'}},
        "a grammar and tool_choice both say what the text must be",
        "tool_choice",
    ),
    (
        {
            "tools": STRICT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "x"}}}},
            },
        },
        "the JSON schema cannot be followed at /properties/a: Invalid type: x",
        "guided",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(200)],
            "tool_choice": "required",
        },
        "600 are the most; give fewer than 200 tools",
        "tools",
    ),
    ({"functions": [{"name": "f"}]}, "functions is not supported here: give tools", "functions"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call": "1"}]}, "did you mean 'tool_call_id'", "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "is unknown", "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls[0] must be", "messages"),
]


@pytest.mark.parametrize(("fields", "line", "field"), BAD)
def test_what_is_wrong_is_said_in_a_line(server: ChatServer, fields: dict[str, Any], line: str, field: str) -> None:
    async def refused(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**ASKED, **fields})
        return caught.value.body

    error = server.ask(templates.HERMES, refused)
    assert line in error["message"] and "\n" not in error["message"] and error["param"] == field
