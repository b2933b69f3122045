"""The conversation of a request to /v1/messages: turns of blocks become the messages of a chat.

A user's turn may hold results of tools, which become messages of their own; consecutive turns of one role are joined,
as Anthropic joins them. Models read text alone: an image or a file in a tool's result, or before the user's last
turn, is replaced by a note, because the conversation has to go on; in the last turn it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.taking import check_names, read_text
from trtrun.chats.messages import NO_TEXT
from trtrun.core.values import show_value
from trtrun.errors import nearest

TEXTS = ("text", "image", "document", "search_result", "container_upload")
"""Kinds of blocks that a turn of the user's may hold."""

RESULTS = ("text", "image", "document", "search_result", "tool_reference")
"""Kinds of blocks that a tool may have found."""

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "image": ("source", "transformations"),
    "document": ("source", "title", "context", "citations"),
    "search_result": ("source", "title", "content", "citations"),
    "container_upload": ("file_id",),
    "tool_reference": ("tool_name",),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "compaction": ("content", "encrypted_content", "signature", "tool_changes"),
}
"""Fields of each kind of block, beside `type` and `cache_control`."""

_NO_CITATIONS: tuple[object, ...] = (None, {"enabled": False}, {})


def kind_of(where: str, block: Any, allowed: Sequence[str]) -> str:
    """The kind of a block, whose fields are known.

    Raises:
        Refusal: it is none of those that may stand there.
    """
    if not isinstance(block, dict):
        raise wrong(f"{where} must be an object with a type, not {show_value(block)}")
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        known = nearest(kind, allowed) if isinstance(kind, str) else ""
        raise wrong(f"{where}.type: {show_value(kind)} is not read here{known}")
    if kind not in allowed:
        *others, last = (name for name in allowed if _TEXT_READERS.get(name) is not _read_no_text)
        given = f"{', '.join(others)} or {last}" if others else last
        raise wrong(f"{where}.type: {show_value(kind)} cannot stand here: give {given}")
    check_names("messages", where, block, ("type", *_FIELDS[kind], "cache_control"))
    return kind


def read_texts(where: str, value: object, allowed: Sequence[str], goes_on: bool = False) -> list[str]:
    """The texts of a text, or of a list of blocks.

    Args:
        where: it stands, for messages.
        value: the text or the list.
        allowed: kinds of blocks.
        goes_on: what is no text has a note in its place, and is not refused.

    Raises:
        Refusal: it is something else.
    """
    field = where.partition("[")[0].partition(".")[0]
    if isinstance(value, str):
        return [read_text(where, field, value)]
    if not isinstance(value, list):
        raise wrong(f"{where} must be a text or a list of text blocks, not {show_value(value)}", field)
    return [read_block(f"{where}[{place}]", block, allowed, goes_on) for place, block in enumerate(value)]


def read_block(where: str, block: Any, allowed: Sequence[str], goes_on: bool = False) -> str:
    """The text of one block; as of `read_texts`."""
    return _TEXT_READERS[kind_of(where, block, allowed)](where, block, goes_on)


def text_of(where: str, block: Mapping[str, Any], name: str) -> str:
    """A field that is a text.

    Raises:
        Refusal: it is none.
    """
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name} must be a text, not {show_value(value)}")
    return read_text(f"{where}.{name}", "messages", value)


def wrong(line: str, field: str = "messages") -> Refusal:
    """What is told of something that is not as it should be."""
    return Refusal(Kind.INVALID, line, field)


def _read_text(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    return text_of(where, block, "text")


def _read_no_text(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    if goes_on:
        return NO_TEXT
    line = f"{where}.type: {show_value(block['type'])} is not read here: this model reads text alone"
    raise wrong(f"{line}: take it out of the conversation")


def _read_summary(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    """What Anthropic's servers have made of the turns before it; none where they could not."""
    return "" if block.get("content") is None else text_of(where, block, "content")


def _read_document(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    """What it says, behind its title, where its source is text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in ("text", "content"):
        return _read_no_text(where, block, goes_on)
    assert isinstance(source, dict)
    _check_citations(where, block)
    if kind == "text":
        texts = [text_of(f"{where}.source", source, "data")]
    else:
        texts = read_texts(f"{where}.source.content", source.get("content"), ("text", "image"), goes_on)
    return "\n".join([*(text_of(where, block, name) for name in ("title", "context") if block.get(name)), *texts])


def _read_search_result(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    _check_citations(where, block)
    head = f"{text_of(where, block, 'title')} ({text_of(where, block, 'source')})"
    return "\n".join([head, *read_texts(f"{where}.content", block.get("content"), ("text",))])


def _read_reference(where: str, block: Mapping[str, Any], goes_on: bool) -> str:
    """A tool that was found: all of them are shown to the model from the beginning."""
    return f"The tool {json.dumps(text_of(where, block, 'tool_name'))} may be called."


def _check_citations(where: str, block: Mapping[str, Any]) -> None:
    if block.get("citations") not in _NO_CITATIONS:
        raise wrong(f"{where}.citations is not supported here: leave it out")


_TEXT_READERS: Mapping[str, Callable[[str, Mapping[str, Any], bool], str]] = {
    "text": _read_text,
    "image": _read_no_text,
    "document": _read_document,
    "search_result": _read_search_result,
    "container_upload": _read_no_text,
    "tool_reference": _read_reference,
    "compaction": _read_summary,
}


_ROLES: Mapping[str, str] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    # Claude Code's own words for what it adds to the user's.
    "ctx": "user",
    "msg": "user",
}
_BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    "user": (*TEXTS, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", "compaction"),
    "system": ("text",),
}
_PASSED_OVER = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback")
"""Kinds of blocks, beside results of their tools, that Anthropic's servers have made while they answered. What came of
them stands in the answer's text."""

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
        texts = [text for text in read_texts("system", system, ("text",)) if not text.startswith(_BILLING)]
        if texts:
            _add(messages, {"role": "system", "content": _parts(texts)})
    if not isinstance(value, list) or not value:
        raise wrong(f"messages must be a list with one message at least, not {show_value(value)}")
    num_old = _num_old(value)
    for place, turn in enumerate(value):
        _read_turn(f"messages[{place}]", turn, messages, goes_on=place < num_old)
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise wrong("messages: the last one calls a tool: give its tool_result in a message of the user's")
    return Conversation(messages, last["role"] == "assistant")


def _num_old(turns: list[Any]) -> int:
    """How many turns, from the first one on, nobody can take back: those before the user's last one, and that, too,
    where it is an agent's with what its tools have found, beside which it may have put files."""
    for place in range(len(turns), 0, -1):
        turn = turns[place - 1] if isinstance(turns[place - 1], dict) else {}
        content = turn.get("content")
        if turn.get("role") != "system":
            blocks = content if isinstance(content, list) else []
            has_results = any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
            return place if has_results else place - 1
    return 0


def _read_turn(where: str, turn: Any, messages: list[Message], goes_on: bool) -> None:
    if not isinstance(turn, dict):
        raise wrong(f"{where} must be an object, not {show_value(turn)}")
    check_names("messages", where, turn, ("role", "content"))
    role = _ROLES.get(turn["role"]) if isinstance(turn.get("role"), str) else None
    if role is None:
        raise wrong(f"{where}.role must be user, assistant or system, not {show_value(turn.get('role'))}")
    content = turn.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(f"{where}.content must be a text or a list of blocks, not {show_value(content)}")
    if role == "assistant":
        content = [block for block in content if not _is_passed_over(block)]
    if not content:
        _add(messages, {"role": role, "content": "" if role == "assistant" else []})
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = kind_of(place, block, _BLOCKS_OF[role])
        if kind in _READERS:
            message = _READERS[kind](place, block)
        else:
            message = {"content": _parts([read_block(place, block, _BLOCKS_OF[role], goes_on)])}
        _add(messages, message | {"role": "tool" if kind == "tool_result" else role})


def _is_passed_over(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and (kind in _PASSED_OVER or kind.endswith("_tool_result"))


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


def _read_result(where: str, block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    texts = [] if content is None else read_texts(f"{where}.content", content, RESULTS, goes_on=True)
    return {"tool_call_id": text_of(where, block, "tool_use_id"), "content": _parts(texts)}


def _read_call(where: str, block: Mapping[str, Any]) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.input must be an object, not {show_value(arguments)}")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise wrong(f"{where}.input must be JSON, without NaN, and not nested too deeply") from None
    function = {"name": text_of(where, block, "name"), "arguments": read_text(f"{where}.input", "messages", written)}
    call = {"id": text_of(where, block, "id"), "type": "function", "function": function}
    return {"content": "", "tool_calls": [call]}


def _read_thoughts(where: str, block: Mapping[str, Any]) -> Message:
    return {"content": "", "reasoning_content": text_of(where, block, "thinking")}


def _read_hidden(where: str, block: Mapping[str, Any]) -> Message:
    """What is encrypted nobody here can read."""
    return {"content": ""}


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Message]] = {
    "tool_result": _read_result,
    "tool_use": _read_call,
    "thinking": _read_thoughts,
    "redacted_thinking": _read_hidden,
}


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
