"""Requests to /v1/responses: their fields, and the chats that they ask for.

Chats are read by the same code as those of /v1/chat/completions; errors name this API's fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.calls import ChatCall
from launch.serve.api.openai.fields import OPENAI, Field, Treatment
from launch.serve.api.openai.responses.items import read_items
from launch.serve.api.openai.responses.tools import read_choice, read_tools
from launch.serve.api.openai.taking import check_names, take_fields
from launch.serve.api.openai.types import SAMPLING_FIELDS, read_chat
from trtrun.chats.tools import at_places, words_at_places
from trtrun.core.values import show_value

EFFECT = (
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "stream", "stream_options", "top_logprobs", "include", "metadata",
)  # fmt: skip
IGNORED = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier",
    "client_metadata", "store",
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "background_options": (),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
"""Taken at these values alone: nothing is kept between requests, and no tool is run here."""

OTHERS = tuple(
    sorted(
        SAMPLING_FIELDS - {"max_tokens", "n", "prompt_logprobs", *EFFECT}
        | {"chat_template_kwargs", "documents", "request_id", "stop_in_thoughts"}
    )
)
"""Fields of chats, with the same meaning."""

RESPONSE_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        *(Field(name, OPENAI, Treatment.EFFECT) for name in (*EFFECT, *OTHERS)),
        *(Field(name, OPENAI, Treatment.IGNORED) for name in IGNORED),
        *(Field(name, OPENAI, Treatment.NEUTRAL, neutral=values) for name, values in NEUTRAL.items()),
    )
}


_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "stream_options", *OTHERS)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Parts of answers that may be asked for. The first has an effect: the others are of items that no answer has here."""
_REASONING = ("effort", "summary", "generate_summary", "context", "mode")
"""Fields of reasoning. The effort has an effect: thoughts are told as they are, and not summed up."""

_FORMAT = ("type", "name", "description", "schema", "strict")

_WORDS = (
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"((?:\btools\[\d+\])(?:\.tools\[\d+\])?)\.function\b"), r"\1"),
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
    conversation = read_items(given.get("instructions"), given["input"])
    asked["messages"] = conversation.messages
    if "max_output_tokens" in given:
        asked["max_tokens"] = given["max_output_tokens"]
    offered = read_tools(given.get("tools", []), conversation.tools)
    if offered.functions:
        asked["tools"] = offered.functions
    if offered.functions or given.get("tool_choice", "auto") != "auto":
        asked["tool_choice"] = read_choice(given.get("tool_choice", "auto"))
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
        told = in_words_of_responses(refusal)
        raise Refusal(told.kind, words_at_places(str(told), offered.places), told.field, told.code) from None
    answering = replace(call.answering, echoed=_echo(given, call, offered.tools), call_items=offered.items)
    tools = None if call.tools is None else at_places(call.tools, offered.places)
    # Agents ask for effort whatever the model is.
    rendering = replace(call.rendering, needs_effort=False)
    return replace(call, answering=answering, tools=tools, rendering=rendering)


def in_words_of_responses(refusal: Refusal) -> Refusal:
    """What is said of a chat, said of a response."""
    line, field = str(refusal), refusal.field
    for words, others in _WORDS:
        line = words.sub(others, line)
        field = None if field is None else words.sub(others, field)
    return Refusal(refusal.kind, line, field, refusal.code)


def _echo(given: Mapping[str, Any], call: ChatCall, tools: Sequence[Any]) -> dict[str, str]:
    """What a response says of its request, each field as JSON; of tools, those that the model is offered."""
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
        "tools": tools,
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": sampling.top_p,
    }
    try:
        return {name: json.dumps(value, allow_nan=False) for name, value in told.items()}
    except (ValueError, RecursionError):
        line = "metadata, tools and text must be JSON, without NaN, and not nested too deeply"
        raise Refusal(Kind.INVALID, line) from None


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
    if value.get("verbosity") not in (None, "low", "medium", "high"):
        line = f"text.verbosity must be low, medium or high, not {show_value(value['verbosity'])}"
        raise _wrong("text", line)
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
