"""The texts of blocks in a conversation of /v1/messages: of what is text, and of what stands for text.

A model here reads text alone. An image or a file in what a tool has found, or before the user's last turn, has a note
in its place: nobody can take it back there, and the conversation has to go on. In the last turn it is refused. It knows
JSON values, and no turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.taking import check_names
from launch.serve.api.openai.texts import read_text
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
"""Of each kind of block, beside `type` and `cache_control`."""

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
        *others, last = (name for name in allowed if _READERS.get(name) is not _read_no_text)
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
    return _READERS[kind_of(where, block, allowed)](where, block, goes_on)


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


_READERS: Mapping[str, Callable[[str, Mapping[str, Any], bool], str]] = {
    "text": _read_text,
    "image": _read_no_text,
    "document": _read_document,
    "search_result": _read_search_result,
    "container_upload": _read_no_text,
    "tool_reference": _read_reference,
    "compaction": _read_summary,
}
