"""Messages of chats as chat templates know them: by the names, roles, ids and forms of calls that they look at.

It knows messages, and of templates only what their source holds.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

_DEVELOPER = re.compile(r"['\"]developer['\"]")

_ASKS_FOR_NULL = re.compile(r"(?<![A-Za-z_])content['\"]?\]?\s+is\s+(?:not\s+)?none", re.IGNORECASE)
"""What a template holds that may write calls only where a message's content is null, as DeepSeek's do."""

_WANTS_SHORT_IDS = re.compile(r"length\s*(?:!=|<)\s*9\b")
"""What a template holds that refuses other ids of calls, as Mistral's do."""

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
    return [*_with_calls_apart(_with_short_ids(told, source), source)]


def ways_of_calls(told: Sequence[Mapping[str, Any]], source: str) -> list[Sequence[Mapping[str, Any]]]:
    """Messages in each way that a template may want calls in, itself among them: with null beside them first, where it
    asks for that; with arguments as objects before those as texts."""
    texts = _with_arguments_as_texts(told)
    ways: list[Sequence[Mapping[str, Any]]] = [told] if texts is None else [told, texts]
    if _ASKS_FOR_NULL.search(source) and any(map(_is_call_alone, told)):
        ways = [*([_with_null(message) for message in way] for way in ways), *ways]
    return ways


def with_turns_joined(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages for templates that take one system message, at the beginning, and then turns by turns, as Qwen3.5's,
    Mistral's and Gemma's: system messages at the beginning are one, later ones are the user's, and messages of the user
    that follow each other are one. None where they are so already. Agents send others: Codex begins with two, and
    Claude Code has some in the middle."""
    joined: list[dict[str, Any]] = []
    for message in told:
        role = message["role"]
        if role in _OF_SYSTEM and any(earlier["role"] not in _OF_SYSTEM for earlier in joined):
            role = "user"
        last = joined[-1] if joined else {"role": None}
        if (role == "user" == last["role"]) or (role in _OF_SYSTEM and last["role"] in _OF_SYSTEM):
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined if joined != list(told) else None


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
