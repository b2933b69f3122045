"""A chat with tools, as tests ask for it."""

from __future__ import annotations

from typing import Any

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
