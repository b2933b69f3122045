"""The input of /v1/responses: items become the messages of a chat.

Thoughts and calls of one answer are items of their own there, and one message here; calls of every kind are a
function's. What messages hold is checked behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.responses.tools import INPUT, LOCAL_SHELL, TOOL_SEARCH, shown_name
from trtrun.chats.messages import NO_TEXT
from trtrun.core.values import show_value
from trtrun.errors import nearest

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_NO_TEXTS = ("input_image", "input_file", "input_audio", "encrypted_content")

_PASSED_OVER = (
    "web_search_call", "image_generation_call", "file_search_call", "code_interpreter_call", "computer_call",
    "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
)  # fmt: skip
"""Kinds of items that OpenAI's servers make while they answer. What came of them stands in the answer's text."""


class Conversation(NamedTuple):
    """What an input holds.

    Attributes:
        messages: of a chat.
        tools: that were found on the way, and may be called from then on, each with its place in the input.
    """

    messages: list[dict[str, Any]]
    tools: list[tuple[str, Any]]


def read_items(instructions: object, value: object) -> Conversation:
    """The messages of an input, a text or a list of items, behind instructions, or None.

    Raises:
        Refusal: an item is of a kind that is not read here, or none at all.
    """
    messages: list[dict[str, Any]] = []
    tools: list[tuple[str, Any]] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise _wrong(f"instructions must be a text, not {show_value(instructions)}", "instructions")
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return Conversation([*messages, {"role": "user", "content": value}], tools)
    if not isinstance(value, list) or not value:
        raise _wrong(f"input must be a text, or a list with one item at least, not {show_value(value)}")
    is_answer = False  # the last message is an assistant's, whose answer may go on
    for place, item in enumerate(value):
        where = f"input[{place}]"
        kind = _kind_of(where, item)
        if kind in _PASSED_OVER:
            continue
        if kind in ("tool_search_output", "additional_tools"):
            tools += _read_tools(where, item)
        if kind == "additional_tools":
            continue
        if kind == "message" and place + 1 < len(value):
            message = _read_message(where, item, NO_TEXT)
        else:
            message = _READERS[kind](where, item)
        goes_on = message["role"] == "assistant"
        if goes_on and is_answer and _fits(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
        is_answer = goes_on
    return Conversation(messages, tools)


def _kind_of(where: str, item: Any) -> str:
    if not isinstance(item, dict):
        raise _wrong(f"{where} must be an object, not {show_value(item)}")
    kind = item.get("type", "message" if "role" in item else None)
    known = (*_READERS, *_PASSED_OVER, "additional_tools")
    if not isinstance(kind, str) or kind not in known:
        hint = nearest(kind, known) if isinstance(kind, str) else ""
        raise _wrong(f"{where}.type: {show_value(kind)} is not read here{hint}")
    return kind


def _fits(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the same answer: it thinks, speaks, and calls, in this order."""
    if "reasoning_content" in message:
        return False
    return not message["content"] or not (last["content"] or last.get("tool_calls"))


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    last["content"] = last["content"] or message["content"]
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])


def _read_message(where: str, item: Mapping[str, Any], instead: str | None = None) -> dict[str, Any]:
    """`instead` is what stands for images; without it they are refused."""
    content = item.get("content")
    if isinstance(content, list):
        parts = _texts(f"{where}.content", content, instead)
        is_own = item.get("role") == "assistant"
        content = "".join(parts) if is_own else [{"type": "text", "text": text} for text in parts]
    return {"role": item.get("role"), "content": content}


def _read_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return _call(item, shown_name(item.get("name"), item.get("namespace")), item.get("arguments"))


def _read_custom_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return _call(item, shown_name(item.get("name"), item.get("namespace")), {INPUT: item.get("input")})


def _read_search_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return _call(item, TOOL_SEARCH, item.get("arguments"))


def _read_shell_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    action = item.get("action")
    if not isinstance(action, dict):
        raise _wrong(f"{where}.action must be an object, not {show_value(action)}")
    names = ("command", "working_directory", "timeout_ms")
    return _call(item, LOCAL_SHELL, {name: action[name] for name in names if action.get(name) is not None})


def _call(item: Mapping[str, Any], name: object, arguments: object) -> dict[str, Any]:
    if isinstance(arguments, dict):
        arguments = _as_json(arguments)
    function = {"name": name, "arguments": arguments}
    # Calls of a client's shell are named by their item's id, where they have no other.
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, list):
        output = "\n".join(_texts(f"{where}.output", output, NO_TEXT))
    return {"role": "tool", "tool_call_id": item.get("call_id") or item.get("id"), "content": output}


def _read_found(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Tools that the client has found: the model sees what it may call from now on."""
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _as_json({"tools": item.get("tools")})}


def _read_tools(where: str, item: Mapping[str, Any]) -> list[tuple[str, Any]]:
    tools = item.get("tools")
    if not isinstance(tools, list):
        raise _wrong(f"{where}.tools must be a list of tools, not {show_value(tools)}")
    return [(f"{where}.tools[{place}]", tool) for place, tool in enumerate(tools)]


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise _wrong("input: calls and tools must be JSON, without NaN, and not nested too deeply") from None


def _read_reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """What was thought, or a summary of it. What is encrypted nobody here can read."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise _wrong(f"{where}.content must be a list of texts, not {show_value(parts)}")
    return {"role": "assistant", "content": "", "reasoning_content": "".join(_texts(f"{where}.content", parts))}


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    "local_shell_call": _read_shell_call,
    "local_shell_call_output": _read_output,
    "tool_search_call": _read_search_call,
    "tool_search_output": _read_found,
    "reasoning": _read_reasoning,
}


def _texts(where: str, parts: Sequence[Any], instead: str | None = None) -> list[str]:
    """The texts of a content's parts; `instead` stands for what is no text, and without it that is refused."""
    found = []
    for place, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if instead is not None and kind in _NO_TEXTS:
            found.append(instead)
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise _wrong(f'{where}[{place}] must be {{"type": "input_text", "text": "…"}}: this model reads text alone')
        found.append(text)
    return found


def _wrong(line: str, field: str = "input") -> Refusal:
    return Refusal(Kind.INVALID, line, field)
