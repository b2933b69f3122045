"""Requests to /v1/messages: their fields and tools, read as the chats that they ask for, and how many tokens they have.

Chats are read by the same code as OpenAI's; errors name this API's fields. Tools that Anthropic's servers would run are
left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.anthropic.conversations import read_conversation, wrong
from launch.serve.api.openai.calls import ChatCall, PromptMaker
from launch.serve.api.openai.fields import Field, Treatment
from launch.serve.api.openai.taking import check_names, take_fields
from launch.serve.api.openai.types import SAMPLING_FIELDS, ModelNames, read_chat
from trtrun.chats.tools import at_places, words_at_places
from trtrun.core.values import read_flag, read_integer, show_value
from trtrun.errors import InvalidRequestError

_ANTHROPIC = "Anthropic"

THREAD = "thread"
"""A conversation that the server is to keep. Clients' tool runners ask for one, and can do without."""

EFFECT = (
    "model", "max_tokens", "messages", "system", "tools", "tool_choice", "stop_sequences", "temperature", "top_p",
    "top_k", "stream", "thinking", "output_config", "output_format", "context_management",
)  # fmt: skip
IGNORED = (
    "metadata", "service_tier", "cache_control", "user_profile_id", "anthropic_version", "anthropic_beta", "betas",
    "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks", "workspace_id", "inference_geo", "speed",
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "mcp_servers": ([],),
    THREAD: (),
}
"""Taken at these values alone: no tool is run here, and nothing is kept between requests."""

OTHERS = tuple(
    sorted(
        SAMPLING_FIELDS
        # What ends a text has to be told.
        - {"n", "prompt_logprobs", "stop", "include_stop_str_in_output", "min_tokens", *EFFECT}
        | {"chat_template_kwargs", "request_id", "stop_in_thoughts"}
    )
)
"""Fields of chats, with the same meaning."""

MESSAGE_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        *(Field(name, _ANTHROPIC, Treatment.EFFECT) for name in (*EFFECT, *OTHERS)),
        *(Field(name, _ANTHROPIC, Treatment.IGNORED) for name in IGNORED),
        *(Field(name, _ANTHROPIC, Treatment.NEUTRAL, neutral=values) for name, values in NEUTRAL.items()),
    )
}


_ON_SERVERS = re.compile(r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_(bm25|regex))(_\d{8})?")
"""Types of tools that Anthropic's servers run. Agents offer them beside their own, whatever the server is."""

_TOOL = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers", "input_examples",
)  # fmt: skip
"""All tools are shown to the model, deferred ones, too."""


class Offered(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: as chats have them.
        places: of each in the request, for messages.
        left_out: names of the others.
    """

    functions: list[dict[str, Any]]
    places: list[str]
    left_out: list[str]


def read_tools(value: object, is_counted: bool) -> Offered:
    """The tools that a request offers.

    With nothing but tools that are left out a request is refused, unless its tokens are only counted: Claude Code asks
    so for a search, and would take whatever the model says for what was found.

    Raises:
        Refusal: one is wrong, or none is left.
    """
    if not isinstance(value, list):
        raise wrong(f"tools must be a list of objects, not {show_value(value)}", "tools")
    offered = Offered([], [], [])
    for place, tool in enumerate(value):
        where = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise wrong(f"{where} must be an object, not {show_value(tool)}", "tools")
        kind = tool.get("type")
        if isinstance(kind, str) and _ON_SERVERS.fullmatch(kind):
            offered.left_out.append(str(tool.get("name")))
            continue
        offered.functions.append({"type": "function", "function": _read_tool(where, tool)})
        offered.places.append(where)
    if offered.left_out and not offered.functions and not is_counted:
        raise _not_run("tools[0]", value[0]["type"])
    return offered


def _read_tool(where: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if value.get("type", "custom") not in ("custom", None):
        raise _not_run(where, value["type"])
    check_names("tools", where, value, _TOOL)
    callers = value.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        raise wrong(f"{where}.allowed_callers is not supported here: leave it out", "tools")
    schema, examples = value.get("input_schema"), value.get("input_examples")
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema must be a JSON schema, not {show_value(schema)}", "tools")
    if examples is not None and not (isinstance(examples, list) and all(isinstance(item, dict) for item in examples)):
        raise wrong(f"{where}.input_examples must be a list of objects, not {show_value(examples)}", "tools")
    function = {name: value[name] for name in ("name", "description", "strict") if value.get(name) is not None}
    # A schema's own word for examples, which templates show as they show the schema.
    return function | {"parameters": {**schema, "examples": examples} if examples else schema}


def _not_run(where: str, kind: object) -> Exception:
    return wrong(
        f"{where}.type: {show_value(kind)} is not run here: give tools of your own, with an input_schema", "tools"
    )


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
"""Edits of the context, which answers say were not applied: templates decide what they show of earlier thoughts, and
what tools have found stays."""

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


def count_tokens(values: object, names: ModelNames, prompts: PromptMaker, most_tokens: int) -> dict[str, int]:
    """The number of a conversation's tokens, by the model's template.

    Args:
        values: the body: that of a message, whose `max_tokens` may be left out.
        names: that clients may call the model.
        prompts: makes the tokens.
        most_tokens: that a prompt has room for.

    Raises:
        Refusal: it is wrong, or cannot become tokens.
    """
    call = read_message(values, *names, is_counted=True)
    try:
        tokens, _ = prompts.of_chat(call, most_tokens)
    except Refusal as refusal:
        raise in_words_of_messages(refusal) from None
    return {"input_tokens": len(tokens)}
