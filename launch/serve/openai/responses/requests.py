"""Requests to /v1/responses: the chats that they ask for, in the words of chats.

What chats are refused for is told in this API's words. It knows JSON values, and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from launch.serve.door.refusals import Kind, Refusal
from launch.serve.openai.calls import ChatCall
from launch.serve.openai.responses.fields import OTHERS, RESPONSE_FIELDS
from launch.serve.openai.responses.items import read_items
from launch.serve.openai.taking import check_names, take_fields
from launch.serve.openai.types import read_chat
from trtrun.core.values import show_value

_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "stream_options", *OTHERS)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_REASONING = ("effort", "summary", "generate_summary", "context", "mode")
"""Of which the effort has an effect: thoughts are told as they are, and not summed up."""

_TOOL = ("type", "name", "description", "parameters", "strict")
_FORMAT = ("type", "name", "description", "schema", "strict")

_WORDS = (
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
)
"""What stands in messages about chats, and what it is called here."""

_NO_DEFAULTS: Mapping[str, Any] = {}


def read_response(
    values: object, model_name: str, adapters: Collection[str] = (), defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> ChatCall:
    """The chat that a body of /v1/responses asks for, of a model or one of its adapters; `defaults` is sampling that it
    does not say.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = take_fields(values, RESPONSE_FIELDS, "responses")
    if "input" not in given:
        raise _wrong("input", "input is missing: a text, or a list of items")
    asked: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    asked["messages"] = read_items(given.get("instructions"), given["input"])
    if "max_output_tokens" in given:
        asked["max_tokens"] = given["max_output_tokens"]
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if tools != []:
        asked |= {"tools": _read_tools(tools), "tool_choice": _read_choice(choice)}
    elif choice != "auto":
        asked["tool_choice"] = _read_choice(choice)
    _object(given, "metadata")
    form = _read_text(given).get("format")
    if form is not None:
        asked["response_format"] = _read_format(form)
    check_names("reasoning", "reasoning", _object(given, "reasoning"), _REASONING)
    effort = _object(given, "reasoning").get("effort")
    if effort is not None:
        asked["reasoning_effort"] = effort
    if _read_include(given.get("include", [])) or given.get("top_logprobs"):
        asked |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    try:
        call = read_chat(asked, model_name, adapters, defaults)
    except Refusal as refusal:
        raise in_words_of_responses(refusal) from None
    return replace(call, answering=replace(call.answering, echoed=_echo(given, call)))


def in_words_of_responses(refusal: Refusal) -> Refusal:
    """What is said of a chat, said of a response."""
    line, field = str(refusal), refusal.field
    for words, others in _WORDS:
        line = words.sub(others, line)
        field = None if field is None else words.sub(others, field)
    return Refusal(refusal.kind, line, field, refusal.code)


def _echo(given: Mapping[str, Any], call: ChatCall) -> dict[str, str]:
    """What a response says of its request, each field as JSON."""
    sampling, reasoning = call.answering.sampling, _object(given, "reasoning")
    told = {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **_object(given, "text")},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": sampling.top_p,
    }
    try:
        return {name: json.dumps(value, allow_nan=False) for name, value in told.items()}
    except (ValueError, RecursionError):
        line = "metadata, tools and text must be JSON, without NaN, and not nested too deeply"
        raise Refusal(Kind.INVALID, line) from None


def _read_tools(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong("tools", f"tools must be a list of objects, not {show_value(value)}")
    return [_read_tool(f"tools[{place}]", tool) for place, tool in enumerate(value)]


def _read_tool(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("tools", f"{where} must be an object, not {show_value(value)}")
    if value.get("type") != "function":
        raise _wrong(
            "tools", f"{where}.type must be function, not {show_value(value.get('type'))}: no others are run here"
        )
    check_names("tools", where, value, _TOOL)
    return {"type": "function", "function": {name: item for name, item in value.items() if name != "type"}}


def _read_choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") == "allowed_tools":
        listed = value.get("tools")
        tools = [_named(item) for item in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return _named(value)


def _named(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _read_format(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("text", f"text.format must be an object, not {show_value(value)}")
    if value.get("type") != "json_schema":
        return value
    check_names("text", "text.format", value, _FORMAT)
    return {"type": "json_schema", "json_schema": {name: item for name, item in value.items() if name != "type"}}


def _read_text(given: Mapping[str, Any]) -> Mapping[str, Any]:
    value = _object(given, "text")
    check_names("text", "text", value, ("format", "verbosity"))
    if value.get("verbosity") not in (None, "medium"):
        raise _wrong("text", 'text.verbosity is not supported here: leave it out, or give "medium"')
    return value


def _read_include(value: object) -> bool:
    """Whether log probabilities are asked for."""
    if not isinstance(value, list):
        raise _wrong("include", f"include must be a list, not {show_value(value)}")
    for item in value:
        if item not in _INCLUDABLE:
            raise _wrong("include", f"include: {show_value(item)} is not there: leave it out")
    return _LOGPROBS in value


def _object(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(name, f"{name} must be an object, not {show_value(value)}")
    return value


def _wrong(field: str, line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, field)
