"""Requests to /v1/messages: the chats that they ask for, in the words of chats.

What chats are refused for is told in this API's words. It knows JSON values, and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.anthropic.conversations import read_conversation
from launch.serve.api.anthropic.fields import MESSAGE_FIELDS, OTHERS
from launch.serve.api.anthropic.tools import read_tools
from launch.serve.api.openai.calls import ChatCall
from launch.serve.api.openai.taking import check_names, take_fields
from launch.serve.api.openai.types import read_chat
from trtrun.chats.tools import at_places, words_at_places
from trtrun.core.values import read_flag, read_integer, show_value
from trtrun.errors import InvalidRequestError

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *OTHERS)
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Mapping[str, Mapping[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}
"""What a template is told, if it has that."""

_EFFORTS: Mapping[str, str] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_EDITS = ("clear_thinking_20251015", "clear_tool_uses_20250919")
"""Of the context, which answers say were not applied: templates decide what they show of earlier thoughts, and what
tools have found stays."""

_WORDS = (
    (re.compile(r"(\btools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^guided\b(?=:)"), "output_config.format"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"\bresponse_format\b"), "output_config.format"),
    (re.compile(r"^continue_final_message\b"), "messages"),
)
"""What stands in messages about chats, and what it is called here."""

_NO_DEFAULTS: Mapping[str, Any] = {}


def read_message(
    values: object,
    model_name: str,
    adapters: Collection[str] = (),
    defaults: Mapping[str, Any] = _NO_DEFAULTS,
    *,
    is_counted: bool = False,
) -> ChatCall:
    """The chat that a body of /v1/messages asks for, of a model or one of its adapters.

    Args:
        values: the body.
        model_name, adapters: that there are.
        defaults: sampling that the body does not say.
        is_counted: it is a body of /v1/messages/count_tokens, which wants no answer.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = take_fields(values, MESSAGE_FIELDS, "messages")
    if "messages" not in given:
        raise _wrong("messages", 'messages is missing: a list such as [{"role": "user", "content": "…"}]')
    if "max_tokens" not in given and not is_counted:
        raise _wrong("max_tokens", "max_tokens is missing: how many tokens the answer has at most")
    asked: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    asked["messages"], goes_on = read_conversation(given.get("system"), given["messages"])
    if goes_on:
        asked["continue_final_message"] = True
    stops = _read_stops(given.get("stop_sequences", []))
    if stops:
        # What stands at the end of a text says which one ended it; the answer cuts it off.
        asked |= {"stop": stops, "include_stop_str_in_output": True}
    offered = read_tools(given.get("tools", []), is_counted)
    if offered.functions:
        asked["tools"] = offered.functions
    asked |= _read_choice(given.get("tool_choice"), offered.left_out if is_counted else ())
    _check_edits(given.get("context_management", {}))
    thinking, shows_thoughts, budget = _read_thinking(given.get("thinking"))
    effort, form = _read_output(given)
    kwargs = given.get("chat_template_kwargs", {})
    if isinstance(kwargs, dict):
        asked["chat_template_kwargs"] = {**thinking, **effort, **kwargs}
    asked["include_reasoning"] = shows_thoughts
    if form is not None:
        asked["response_format"] = form
    try:
        call = read_chat(asked, model_name, adapters, defaults)
    except Refusal as refusal:
        told = in_words_of_messages(refusal)
        raise Refusal(told.kind, words_at_places(str(told), offered.places), told.field, told.code) from None
    tools = None if call.tools is None else at_places(call.tools, offered.places)
    echoed = {} if "context_management" not in given else {"context_management": json.dumps({"applied_edits": []})}
    return replace(call, tools=tools, thinking_budget=budget, answering=replace(call.answering, echoed=echoed))


def in_words_of_messages(refusal: Refusal) -> Refusal:
    """What is said of a chat, said of a message."""
    line, field = str(refusal), refusal.field
    for words, others in _WORDS:
        line = words.sub(others, line)
        field = None if field is None else words.sub(others, field)
    return Refusal(refusal.kind, line, field, refusal.code)


def _read_stops(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise _wrong("stop_sequences", f"stop_sequences must be a list of texts, not {show_value(value)}")
    return [text for text in value if text]


def _read_choice(value: Any, left_out: Sequence[str]) -> dict[str, Any]:
    """`tool_choice` in the words of chats; that of a tool which is left out is passed over."""
    if value is None or (isinstance(value, dict) and value.get("name") in left_out):
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        line = f'tool_choice must be {{"type": "auto"}}, or any, tool or none in its place, not {show_value(value)}'
        raise _wrong("tool_choice", line)
    known = ("type", *(("name",) if kind == "tool" else ()), "disable_parallel_tool_use")
    check_names("tool_choice", "tool_choice", value, known)
    try:
        is_single = read_flag("tool_choice.disable_parallel_tool_use", value.get("disable_parallel_tool_use") or False)
    except InvalidRequestError as error:
        raise _wrong("tool_choice", str(error)) from None
    if kind == "tool" and not isinstance(value.get("name"), str):
        line = f'tool_choice must name a tool, as {{"type": "tool", "name": "…"}}, not {show_value(value)}'
        raise _wrong("tool_choice", line)
    named = {"type": "function", "function": {"name": value.get("name")}}
    return {"tool_choice": _CHOICES.get(kind, named), "parallel_tool_calls": not is_single}


def _read_thinking(value: Any) -> tuple[Mapping[str, bool], bool, int | None]:
    """What templates are told of thinking; whether the answer tells what is thought; how many tokens that may be."""
    if value is None:
        return {}, True, None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        line = f'thinking must be {{"type": "enabled"}}, or disabled or adaptive in its place, not {show_value(value)}'
        raise _wrong("thinking", line)
    check_names("thinking", "thinking", value, ("type", "budget_tokens", "display"))
    budget = None
    if value.get("budget_tokens") is not None:
        try:
            budget = read_integer("thinking.budget_tokens", value["budget_tokens"])
        except InvalidRequestError as error:
            raise _wrong("thinking", str(error)) from None
        if budget < 0:
            raise _wrong("thinking", f"thinking.budget_tokens must be 0 or more, not {budget}")
    if value.get("display") not in (None, "summarized", "omitted"):
        line = f"thinking.display must be summarized or omitted, not {show_value(value['display'])}"
        raise _wrong("thinking", line)
    return _THINKING[kind], value.get("display") != "omitted", budget


def _read_output(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any] | None]:
    """What templates are told of effort, and the form of the text; None for any."""
    config = given.get("output_config", {})
    if not isinstance(config, dict):
        raise _wrong("output_config", f"output_config must be an object, not {show_value(config)}")
    check_names("output_config", "output_config", config, ("effort", "format", "task_budget"))
    effort = config.get("effort")
    if effort is not None and effort not in list(_EFFORTS):
        line = f"output_config.effort must be one of {', '.join(_EFFORTS)}, not {show_value(effort)}"
        raise _wrong("output_config", line)
    told = {} if effort is None else {"reasoning_effort": _EFFORTS[effort]}
    form = config.get("format")
    if form is None:
        form = given.get("output_format")
    if form is None:
        return told, None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        line = f'output_config.format must be {{"type": "json_schema", "schema": {{…}}}}, not {show_value(form)}'
        raise _wrong("output_config", line)
    check_names("output_config", "output_config.format", form, ("type", "schema"))
    return told, {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}


def _check_edits(value: Any) -> None:
    """Refuse what nobody here knows, or would make something else of the conversation."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    if not isinstance(edits, list):
        raise _wrong("context_management", f"context_management must be an object with edits, not {show_value(value)}")
    check_names("context_management", "context_management", value, ("edits",))
    for place, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind not in _EDITS:
            line = f"context_management.edits[{place}].type: {show_value(kind)} is not supported here: leave it out"
            raise _wrong("context_management", line)


def _wrong(field: str, line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, field)
