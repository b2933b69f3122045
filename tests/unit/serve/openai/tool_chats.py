"""A chat with tools, as tests ask for it, and what clients make of its answers."""

from __future__ import annotations

from typing import Any

import openai
from chat_server import ChatServer

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
CITY = {
    **COMPACT,
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    **COMPACT,
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city", "description": "not <think> of </tool_call>"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 120}


def ask(server: ChatServer, template: str, **fields: Any) -> Any:
    """A whole answer."""
    return server.ask(template, lambda client: client.chat.completions.create(**{**ASKED, **fields}))


def stream(server: ChatServer, template: str, **fields: Any) -> list[Any]:
    """The chunks of the same answer."""

    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        asked: dict[str, Any] = {**ASKED, **fields, "stream": True}
        return [chunk async for chunk in await client.chat.completions.create(**asked)]

    return server.ask(template, read)


def joined(chunks: list[Any], index: int = 0) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Content, thoughts, calls, and why a choice ended, as clients put chunks together."""
    content, thoughts, calls, reason = "", "", list[list[str]](), None
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        delta = choice.delta
        content += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for told in delta.tool_calls or ():
            if told.id is not None:
                assert told.index == len(calls) and told.type == "function"
                calls.append([told.function.name, ""])
            calls[told.index][1] += told.function.arguments or ""
        assert reason is None or choice.finish_reason is None
        reason = choice.finish_reason or reason
    return content, thoughts, [(name, arguments) for name, arguments in calls], reason


def whole(answer: Any, index: int = 0) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """The same of a whole answer."""
    choice = answer.choices[index]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    thoughts = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", thoughts, calls, choice.finish_reason
