"""Requests to /v1/messages: the chats that they ask for, in the words of chats.

What chats are refused for is told in this API's words. It knows JSON values, and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from launch.serve.anthropic.conversations import read_conversation
from launch.serve.anthropic.fields import MESSAGE_FIELDS, OTHERS
from launch.serve.door.refusals import Kind, Refusal
from launch.serve.openai.calls import ChatCall
from launch.serve.openai.taking import check_names, take_fields
from launch.serve.openai.types import read_chat
from trtrun.core.values import read_flag, read_integer, show_value
from trtrun.errors import InvalidRequestError

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *OTHERS)
_TOOL = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers", "input_examples",
)  # fmt: skip
_OF_TOOL_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Mapping[str, Mapping[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}
"""What a template is told, if it has that."""

_EFFORTS: Mapping[str, str] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_NO_EDITS = ("clear_thinking_20251015",)
"""Of the context: templates decide what they show of earlier thoughts."""

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
    asked |= _read_tools(given.get("tools", [])) | _read_choice(given.get("tool_choice"))
    _check_edits(given.get("context_management", {}))
    thinking, shows_thoughts = _read_thinking(given.get("thinking"))
    effort, form = _read_output(given)
    kwargs = given.get("chat_template_kwargs", {})
    if isinstance(kwargs, dict):
        asked["chat_template_kwargs"] = {**thinking, **effort, **kwargs}
    asked["include_reasoning"] = shows_thoughts
    if form is not None:
        asked["response_format"] = form
    try:
        return read_chat(asked, model_name, adapters, defaults)
    except Refusal as refusal:
        raise in_words_of_messages(refusal) from None


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


def _read_tools(value: object) -> dict[str, Any]:
    if not isinstance(value, list):
        raise _wrong("tools", f"tools must be a list of objects, not {show_value(value)}")
    return {"tools": [_read_tool(f"tools[{place}]", tool) for place, tool in enumerate(value)]} if value else {}


def _read_tool(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("tools", f"{where} must be an object, not {show_value(value)}")
    if value.get("type", "custom") not in ("custom", None):
        line = (
            f"{where}.type: {show_value(value['type'])} is not run here: give tools of your own, with an input_schema"
        )
        raise _wrong("tools", line)
    check_names("tools", where, value, _TOOL)
    for name, neutral in _OF_TOOL_NEUTRAL.items():
        if value.get(name) is not None and value[name] not in neutral:
            raise _wrong("tools", f"{where}.{name} is not supported here: leave it out")
    if not isinstance(value.get("input_schema"), dict):
        found = show_value(value.get("input_schema"))
        raise _wrong("tools", f"{where}.input_schema must be a JSON schema, not {found}")
    function = {name: value[name] for name in ("name", "description", "strict") if value.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": value["input_schema"]}}


def _read_choice(value: Any) -> dict[str, Any]:
    if value is None:
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


def _read_thinking(value: Any) -> tuple[Mapping[str, bool], bool]:
    """What templates are told of thinking, and whether the answer tells what is thought."""
    if value is None:
        return {}, True
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        line = f'thinking must be {{"type": "enabled"}}, or disabled or adaptive in its place, not {show_value(value)}'
        raise _wrong("thinking", line)
    check_names("thinking", "thinking", value, ("type", "budget_tokens", "display"))
    if value.get("budget_tokens") is not None:
        try:
            read_integer("thinking.budget_tokens", value["budget_tokens"])
        except InvalidRequestError as error:
            raise _wrong("thinking", str(error)) from None
    if value.get("display") not in (None, "summarized", "omitted"):
        line = f"thinking.display must be summarized or omitted, not {show_value(value['display'])}"
        raise _wrong("thinking", line)
    return _THINKING[kind], value.get("display") != "omitted"


def _read_output(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any] | None]:
    """What templates are told of effort, and the form of the text; None for any."""
    config = given.get("output_config", {})
    if not isinstance(config, dict):
        raise _wrong("output_config", f"output_config must be an object, not {show_value(config)}")
    check_names("output_config", "output_config", config, ("effort", "format"))
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
    """Refuse what would leave something out of the conversation."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    if not isinstance(edits, list):
        raise _wrong("context_management", f"context_management must be an object with edits, not {show_value(value)}")
    check_names("context_management", "context_management", value, ("edits",))
    for place, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind not in _NO_EDITS:
            line = f"context_management.edits[{place}].type: {show_value(kind)} is not supported here: leave it out"
            raise _wrong("context_management", line)


def _wrong(field: str, line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, field)
