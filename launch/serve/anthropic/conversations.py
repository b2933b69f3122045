"""The conversation of a request to /v1/messages: turns of blocks become the messages of a chat.

A turn of the user's may hold results of tools, which are messages of their own here; turns of one role that follow each
other are one, as Anthropic has it. It knows JSON values, and no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.serve.door.refusals import Kind, Refusal
from launch.serve.openai.taking import check_names
from launch.serve.openai.texts import read_text
from trtrun.core.values import show_value
from trtrun.errors import nearest

_ROLES: Mapping[str, str] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    # Claude Code's own words for what it adds to the user's.
    "ctx": "user",
    "msg": "user",
}
_BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_use": ("id", "name", "input", "caller"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
"""Of each kind of block, beside `type` and `cache_control`."""

_EMPTY: Mapping[str, object] = {"citations": []}
_BILLING = "x-anthropic-billing-header"
"""What a block of Claude Code's system prompt begins with that is for whoever sends the bill, and that changes from
request to request: the model does not see it, so that what follows is found in the cache."""

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages of a chat.

    Attributes:
        messages: of it.
        goes_on: the answer goes on with the last one, which is the assistant's.
    """

    messages: list[Message]
    goes_on: bool


def read_conversation(system: object, value: object) -> Conversation:
    """The messages of a chat for a system prompt, which may be None, and turns.

    Raises:
        Refusal: there is none, or one has what is not read here.
    """
    messages: list[Message] = []
    if system is not None:
        texts = [text for text in _read_texts("system", system) if not text.startswith(_BILLING)]
        if texts:
            _add(messages, {"role": "system", "content": _parts(texts)})
    if not isinstance(value, list) or not value:
        raise _wrong(f"messages must be a list with one message at least, not {show_value(value)}")
    for place, turn in enumerate(value):
        _read_turn(f"messages[{place}]", turn, messages)
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise _wrong("messages: the last one calls a tool: give its tool_result in a message of the user's")
    return Conversation(messages, last["role"] == "assistant")


def _read_turn(where: str, turn: Any, messages: list[Message]) -> None:
    if not isinstance(turn, dict):
        raise _wrong(f"{where} must be an object, not {show_value(turn)}")
    _check_names(where, turn, ("role", "content"))
    role = _ROLES.get(turn["role"]) if isinstance(turn.get("role"), str) else None
    if role is None:
        raise _wrong(f"{where}.role must be user, assistant or system, not {show_value(turn.get('role'))}")
    content = turn.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(f"{where}.content must be a text or a list of blocks, not {show_value(content)}")
    if not content:
        _add(messages, {"role": role, "content": "" if role == "assistant" else []})
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = _kind_of(place, block, _BLOCKS_OF[role])
        _add(messages, _READERS[kind](place, block) | {"role": "tool" if kind == "tool_result" else role})


def _add(messages: list[Message], message: Message) -> None:
    """Put a message behind others, or what it has into the last one, where that is of the same role."""
    message = dict(message)
    if message["role"] == "assistant" and isinstance(message["content"], list):
        message["content"] = "".join(part["text"] for part in message["content"])
    last = messages[-1] if messages else {"role": None}
    if message["role"] != last["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] += message["content"]
    for name in ("reasoning_content", "tool_calls"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _kind_of(where: str, block: Any, allowed: tuple[str, ...]) -> str:
    """The kind of a block, whose fields are known."""
    if not isinstance(block, dict):
        raise _wrong(f"{where} must be an object with a type, not {show_value(block)}")
    kind = block.get("type")
    if kind in ("image", "document"):
        raise _wrong(f"{where}.type: {show_value(kind)} is not read here: this model reads text alone")
    if not isinstance(kind, str) or kind not in _FIELDS:
        known = nearest(kind, allowed) if isinstance(kind, str) else ""
        raise _wrong(f"{where}.type: {show_value(kind)} is not read here{known}")
    if kind not in allowed:
        raise _wrong(f"{where}.type: {show_value(kind)} cannot stand here: give {' or '.join(allowed)}")
    _check_names(where, block, ("type", *_FIELDS[kind], "cache_control"))
    return kind


def _read_texts(where: str, value: object) -> list[str]:
    """The texts of a text, or of a list of blocks that hold nothing else."""
    field = where.partition("[")[0].partition(".")[0]
    if isinstance(value, str):
        return [read_text(where, field, value)]
    if not isinstance(value, list):
        raise _wrong(f"{where} must be a text or a list of text blocks, not {show_value(value)}", field)
    texts = []
    for place, block in enumerate(value):
        _kind_of(f"{where}[{place}]", block, ("text",))
        texts.append(_text_of(f"{where}[{place}]", block, "text"))
    return texts


def _read_text(where: str, block: Mapping[str, Any]) -> Message:
    return {"content": _parts([_text_of(where, block, "text")])}


def _read_result(where: str, block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    texts = [] if content is None else _read_texts(f"{where}.content", content)
    return {"tool_call_id": _text_of(where, block, "tool_use_id"), "content": _parts(texts)}


def _read_call(where: str, block: Mapping[str, Any]) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.input must be an object, not {show_value(arguments)}")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise _wrong(f"{where}.input must be JSON, without NaN, and not nested too deeply") from None
    function = {"name": _text_of(where, block, "name"), "arguments": read_text(f"{where}.input", "messages", written)}
    call = {"id": _text_of(where, block, "id"), "type": "function", "function": function}
    return {"content": "", "tool_calls": [call]}


def _read_thoughts(where: str, block: Mapping[str, Any]) -> Message:
    return {"content": "", "reasoning_content": _text_of(where, block, "thinking")}


def _read_hidden(where: str, block: Mapping[str, Any]) -> Message:
    """What is encrypted nobody here can read."""
    return {"content": ""}


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Message]] = {
    "text": _read_text,
    "tool_result": _read_result,
    "tool_use": _read_call,
    "thinking": _read_thoughts,
    "redacted_thinking": _read_hidden,
}


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _text_of(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name} must be a text, not {show_value(value)}")
    return read_text(f"{where}.{name}", "messages", value)


def _check_names(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    check_names("messages", where, value, known)
    for name, nothing in _EMPTY.items():
        if value.get(name) not in (None, nothing):
            raise _wrong(f"{where}.{name} is not supported here: leave it out")


def _wrong(line: str, field: str = "messages") -> Refusal:
    return Refusal(Kind.INVALID, line, field)
