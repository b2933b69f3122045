"""The messages of chats in OpenAI's words: read, checked, and put as chat templates see them, with the names, roles,
ids and forms of calls that a template looks at.

Of a template it knows only the source.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning")
"""What an assistant thought, in the words of several servers."""

_DETAILS = "reasoning_details"
"""Thoughts as a list of parts, as OpenRouter and others have it."""

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


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

_DEVELOPER = re.compile(r"['\"]developer['\"]")

_ASKS_FOR_NULL = re.compile(r"(?<![A-Za-z_])content['\"]?\]?\s+is\s+(?:not\s+)?none", re.IGNORECASE)
"""What a template holds that may write calls only where a message's content is null, as DeepSeek's do."""

_WANTS_SHORT_IDS = re.compile(r"length\s*(?:!=|<)\s*9\b")
"""What a template holds that refuses other ids of calls, as Mistral's do."""

_WRITES_IDS_AS_NAMES = "<|tool_call_argument_begin|>"
"""What a template holds that writes a call's id and not its name, as Kimi K2's do: `functions.NAME:0`."""

_FIRST_CALL = re.compile(r"tool_calls['\"]?\]?\s*(?:\[\s*0\s*\]|\|\s*first\b)")
_EACH_CALL = re.compile(r"\bfor\s+[\w, ]+\s+in\s+[^%]*tool_calls")
"""What a template holds that looks at the first call of an answer, or at each. The first alone: it leaves others out
without a word, as gpt-oss's, or refuses them, as Llama 3's."""

_THOUGHTS_OR_TEXT = "both content and thinking"
"""What gpt-oss's template says of an answer with thoughts, text and calls: it writes text as thoughts there."""

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


_OF_SYSTEM = ("system", "developer")

_MOST_LOOKED_AT = 8


def as_template_knows(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages as a template of this source knows them."""
    told = _with_known_roles([_with_thoughts(message, source) for message in messages], source)
    return [*_with_calls_apart(_with_named_ids(_with_short_ids(told, source), source), source)]


def ways_of_calls(messages: Sequence[Mapping[str, Any]], source: str) -> list[Sequence[Mapping[str, Any]]]:
    """Messages in each way that a template may want calls in, itself among them: with null beside them first, where it
    asks for that; with arguments as objects before those as texts."""
    texts = _with_arguments_as_texts(messages)
    ways: list[Sequence[Mapping[str, Any]]] = [messages] if texts is None else [messages, texts]
    if _ASKS_FOR_NULL.search(source) and any(map(_is_call_alone, messages)):
        ways = [*([_with_null(message) for message in way] for way in ways), *ways]
    return ways


def with_turns_joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages for templates that take one system message, at the beginning, and then turns by turns, as Qwen3.5's,
    Mistral's and Gemma's: system messages at the beginning are one, later ones are the user's, and messages of the user
    that follow each other are one. None where they are so already. Agents send others: Codex begins with two, and
    Claude Code has some in the middle."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in _OF_SYSTEM and any(earlier["role"] not in _OF_SYSTEM for earlier in joined):
            role = "user"
        last = joined[-1] if joined else {"role": None}
        if (role == "user" == last["role"]) or (role in _OF_SYSTEM and last["role"] in _OF_SYSTEM):
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined if joined != list(messages) else None


def num_python_objects(text: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """How often a prompt has arguments of calls as Python writes objects, and not as JSON: a template that writes them
    as they are, as Phi-4's, wants texts. What somebody else has written so is counted, too. Templates write calls
    alike: some are looked at."""
    every = (call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ())
    objects = ((str(item), _as_text(item)) for item in every if isinstance(item, dict))
    others = (written for written, as_json in objects if written != as_json)
    return sum(text.count(written) for written in islice(others, _MOST_LOOKED_AT))


def _as_text(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _with_thoughts(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A message with what the assistant thought under the names that templates look at, as transformers has it."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts and message.get("tool_calls") and message["content"] and _THOUGHTS_OR_TEXT in source:
        thoughts = f"{thoughts}\n\n{message['content']}"
        message = {**message, "thinking": thoughts, "content": ""}
    return dict(message) if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _with_short_ids(messages: Sequence[dict[str, Any]], source: str) -> Sequence[dict[str, Any]]:
    """Messages whose calls have ids of nine letters and digits, where a template refuses others: those of other servers
    and programs become such, each the same wherever it stands."""
    if not _WANTS_SHORT_IDS.search(source):
        return messages
    told = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        told.append(message)
    return told


def _with_named_ids(messages: Sequence[dict[str, Any]], source: str) -> Sequence[dict[str, Any]]:
    """Messages whose calls have ids that name their functions, where a template writes no other name: those of other
    servers and programs, or none, become such, with the number of the call in the chat, and results' likewise."""
    if _WRITES_IDS_AS_NAMES not in source:
        return messages
    told, named, count = list[dict[str, Any]](), dict[object, str](), 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                begins, known = f"functions.{call['function']['name']}:", call.get("id")
                own = known if known is not None and known.startswith(begins) else f"{begins}{count}"
                if known is not None:
                    named[known] = own
                calls.append({**call, "id": own})
                count += 1
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id") in named:
            message = {**message, "tool_call_id": named[message["tool_call_id"]]}
        told.append(message)
    return told


def _with_calls_apart(messages: Sequence[dict[str, Any]], source: str) -> Sequence[dict[str, Any]]:
    """Messages with one call each, where a template takes no more: calls of one answer become answers one behind the
    other, each with its result, which a template gives the name of the call before it."""
    if not _FIRST_CALL.search(source) or _EACH_CALL.search(source):
        return messages
    told: list[dict[str, Any]] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            told.append(message)
            continue
        results = []
        while left and left[0]["role"] == "tool":
            results.append(left.popleft())
        told += _one_by_one(message, calls, results)
    return told


def _one_by_one(
    message: dict[str, Any], calls: Sequence[Mapping[str, Any]], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """An answer with several calls, and the results behind it, in their order. Results whose ids are no call's are of
    the calls that have none."""
    by_id: dict[object, deque[dict[str, Any]]] = {call.get("id"): deque() for call in calls}
    others: deque[dict[str, Any]] = deque()
    for result in results:
        by_id.get(result.get("tool_call_id"), others).append(result)
    told = []
    for call in calls:
        told.append({**message, "tool_calls": [call]})
        message = {"role": message["role"], "content": ""}
        own = by_id[call.get("id")] or others
        if own:
            told.append(own.popleft())
    return told + [result for rest in (*by_id.values(), others) for result in rest]


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _with_known_roles(messages: Sequence[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages of whom a template knows: where it has no developers, whose words it would leave out or refuse, they are
    the system's."""
    if _DEVELOPER.search(source):
        return [*messages]
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _is_call_alone(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and message["content"] == ""


def _with_null(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": None} if _is_call_alone(message) else dict(message)


def _with_arguments_as_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages whose calls have their arguments as texts of JSON; None where all have, or there are no calls."""
    told, has_objects = [], False
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if not isinstance(function["arguments"], str):
                has_objects = True
                function = {**function, "arguments": _as_text(function["arguments"])}
            calls.append({**call, "function": function})
        told.append({**message, "tool_calls": calls} if calls else dict(message))
    return told if has_objects else None
