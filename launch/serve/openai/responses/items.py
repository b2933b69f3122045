"""The input of /v1/responses: items become the messages of a chat.

Thoughts and calls of one answer are items of their own there, and one message here. It knows JSON values. What messages
hold is checked behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.serve.door.refusals import Kind, Refusal
from trtrun.core.values import show_value
from trtrun.errors import nearest

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_items(instructions: object, value: object) -> list[dict[str, Any]]:
    """The messages of an input, a text or a list of items, behind instructions, or None.

    Raises:
        Refusal: an item is of a kind that is not read here, or none at all.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise _wrong(f"instructions must be a text, not {show_value(instructions)}", "instructions")
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _wrong(f"input must be a text, or a list with one item at least, not {show_value(value)}")
    is_answer = False  # the last message is an assistant's, whose answer may go on
    for place, item in enumerate(value):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise _wrong(f"{where} must be an object, not {show_value(item)}")
        kind = item.get("type", "message" if "role" in item else None)
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = nearest(kind, _READERS) if isinstance(kind, str) else ""
            raise _wrong(f"{where}.type: {show_value(kind)} is not read here{known}")
        message = read(where, item)
        goes_on = message["role"] == "assistant"
        if goes_on and is_answer and _fits(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
        is_answer = goes_on
    return messages


def _fits(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the same answer: it thinks, speaks, and calls, in this order."""
    if "reasoning_content" in message:
        return False
    return not message["content"] or not (last["content"] or last.get("tool_calls"))


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    last["content"] = last["content"] or message["content"]
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])


def _read_message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, list):
        parts = _texts(f"{where}.content", content)
        is_own = item.get("role") == "assistant"
        content = "".join(parts) if is_own else [{"type": "text", "text": text} for text in parts]
    return {"role": item.get("role"), "content": content}


def _read_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, list):
        output = "\n".join(_texts(f"{where}.output", output))
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


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
    "reasoning": _read_reasoning,
}


def _texts(where: str, parts: Sequence[Any]) -> list[str]:
    """Of parts of a content."""
    found = []
    for place, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
            raise _wrong(f'{where}[{place}] must be {{"type": "input_text", "text": "…"}}: this model reads text alone')
        found.append(text)
    return found


def _wrong(line: str, field: str = "input") -> Refusal:
    return Refusal(Kind.INVALID, line, field)
