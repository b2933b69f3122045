"""The messages of chats, in OpenAI's words, read, checked, and made what chat templates see.

It knows JSON values, and no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning")
"""What an assistant thought, in the words of several servers."""

_DETAILS = "reasoning_details"
"""The same as a list of parts, as OpenRouter and others have it."""

NO_TEXT = "[An image or a file was here. It is left out: this model reads text alone.]"
"""What stands in a conversation for what a tool has found, or somebody has said before, and is no text: nobody can take
it back there, and the conversation has to go on."""

_FIELDS = ("role", "content", "name")
_OF_ROLE: Mapping[str, tuple[str, ...]] = {"assistant": (*REASONING, _DETAILS, "tool_calls"), "tool": ("tool_call_id",)}
_EMPTY: Mapping[str, object] = {"tool_calls": [], "annotations": []}
"""What answers have beside their text, at values that say nothing: clients send answers back as they came."""

_PARSED = "parsed"
"""What OpenAI's own client has read from an answer, and sends back beside its text."""


def read_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a chat, each content as one text.

    Raises:
        InvalidFieldError: there is none, or one is none, or has what is not read here.
    """
    if not isinstance(value, list) or not value:
        raise _wrong(f"messages must be a list with one message at least, not {show_value(value)}")
    return [_read_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def _read_message(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{where} must be an object, not {show_value(value)}")
    role = value.get("role")
    fields = _FIELDS + (_OF_ROLE.get(role, ()) if isinstance(role, str) else ())
    for name, item in value.items():
        if name not in fields and name != _PARSED and item is not None and item != _EMPTY.get(name):
            known = nearest(name, fields)
            raise _wrong(f"{where}: {show_value(name)} is unknown or not supported{known}")
    if role not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}, not {show_value(role)}")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""  # an answer that is all thoughts, or calls
    if isinstance(content, list):
        content = "\n".join(_read_part(f"{where}.content[{place}]", part) for place, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content must be a text or a list of text parts, not {show_value(content)}")
    message = {"role": role, "content": _check_text(f"{where}.content", content)}
    for name in ("name", "tool_call_id", *REASONING):
        text = value.get(name)
        if text is not None:
            message[name] = _read_own_text(f"{where}.{name}", text)
    thoughts = _read_details(f"{where}.{_DETAILS}", value.get(_DETAILS))
    if thoughts and not any(message.get(name) for name in REASONING):
        message[REASONING[0]] = thoughts
    if value.get("tool_calls"):
        message["tool_calls"] = _read_calls(f"{where}.tool_calls", value["tool_calls"])
    return message


def _read_details(where: str, value: object) -> str:
    """The thoughts of parts, each with a text or a summary. What is encrypted nobody here can read."""
    if value is None:
        return ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise _wrong(f"{where} must be a list of objects, not {show_value(value)}")
    told = []
    for place, part in enumerate(value):
        for name in ("text", "summary"):
            if part.get(name) is not None:
                told.append(_read_own_text(f"{where}[{place}].{name}", part[name]))
    return "".join(told)


def _read_calls(where: str, value: object) -> list[dict[str, Any]]:
    """Calls of an earlier answer, arguments as the objects that templates expect; those that are no JSON, as a model
    may have written them, stay texts."""
    if not isinstance(value, list):
        raise _wrong(f"{where} must be a list, not {show_value(value)}")
    calls = []
    for place, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or item.get("type", "function") not in ("function", None):
            raise _wrong(
                f'{where}[{place}] must be {{"id": "…", "type": "function", "function": {{"name": "…", "arguments": '
                f'"…"}}}}, not {show_value(item)}'
            )
        call_id, arguments = item.get("id"), function.get("arguments")
        name = _read_own_text(f"{where}[{place}].function.name", function.get("name"))
        if arguments is None or isinstance(arguments, str):
            _check_text(f"{where}[{place}].function.arguments", arguments or "")
            arguments = _read_arguments(arguments or "")
        if not isinstance(arguments, dict | str):
            raise _wrong(f"{where}[{place}].function.arguments must be a text of JSON, not {show_value(arguments)}")
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if call_id is not None:
            call["id"] = _read_own_text(f"{where}[{place}].id", call_id)
        calls.append(call)
    return calls


def _read_arguments(text: str) -> dict[str, Any] | str:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _read_own_text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{where} must be a text, not {show_value(value)}")
    return _check_text(where, value)


def _read_part(where: str, value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong(f'{where} must be {{"type": "text", "text": "…"}}: this model reads text alone')
    return text


def _check_text(where: str, value: str) -> str:
    """The text, unless it has no UTF-8."""
    try:
        check_characters(where, value)
    except InvalidRequestError as error:
        raise _wrong(str(error)) from None
    return value


def _wrong(line: str) -> InvalidFieldError:
    return InvalidFieldError("messages", line)
