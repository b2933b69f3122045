"""The output of a response: thoughts, messages and calls as items, and the events that announce them as they come.

The model writes the text of a custom tool's call as JSON; it is extracted while it comes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.serve.api.openai.answer_parts import JsonList
from launch.serve.api.openai.calls import CallItem
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event, Reasoning, Text
from launch.serve.api.openai.responses.tools import INPUT, LOCAL_SHELL, TOOL_SEARCH

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MOST_BEFORE = 64
"""Letters in which the text has to begin; behind them nobody looks for its beginning any more."""

_LETTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)
"""Parts of a text of JSON, each as a whole: half of one waits for the other half. Line breaks may stand as they are."""


class CustomInput:
    """The input of one call.

    Arguments that are no object with this text are told at their end: the one text that they hold, or all of them as
    they are.
    """

    def __init__(self) -> None:
        """Begin with no arguments."""
        self._parts: list[str] = []
        self._num_before = 0
        self._has_begun = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """What the next piece of the arguments adds to the text."""
        if self._is_over:
            return ""
        self._parts.append(arguments)
        if not self._has_begun and self._num_before > _MOST_BEFORE:
            return ""
        left = "".join(self._parts)
        if not self._has_begun:
            begin = _BEGIN.match(left)
            if begin is None:
                self._num_before = len(left)
                return ""
            self._has_begun, left = True, left[begin.end() :]
        letters = _LETTERS.match(left)
        end = letters.end() if letters else 0
        self._is_over = left.startswith('"', end)
        self._parts = [] if self._is_over else [left[end:]]
        return _decoded(left[:end])

    def finish(self) -> str:
        """What the end of the arguments adds."""
        left, self._parts = "".join(self._parts), []
        return left if self._has_begun else _only_text(left)


def _decoded(letters: str) -> str:
    text: str = json.loads(f'"{letters}"', strict=False)
    return text


def _only_text(arguments: str) -> str:
    try:
        found = json.loads(arguments, strict=False)
        texts = list(found.values()) if isinstance(found, dict) else [found]
        (text,) = texts
        text.encode()
    except (ValueError, RecursionError, AttributeError):
        return arguments
    return text if isinstance(text, str) else arguments


Told = dict[str, Any]

_CALLS: Mapping[str, tuple[str, Told]] = {
    "function": ("fc", {"type": "function_call", "arguments": ""}),
    "custom": ("ctc", {"type": "custom_tool_call", "input": ""}),
    TOOL_SEARCH: ("tsc", {"type": "tool_search_call", "execution": "client", "arguments": {}}),
    LOCAL_SHELL: ("lsh", {"type": "local_shell_call", "action": {"type": "exec", "command": [], "env": {}}}),
}
"""What the item of a call begins with, and what it has before its arguments are there."""

_DELTAS: Mapping[str, str] = {
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}
"""Events that tell of arguments as they come; other calls have theirs at once."""

_INVALID = "INVALID_JSON"
"""The key of arguments that are no object, where an object is asked for."""


class OutputItems:
    """The items of one response.

    Attributes:
        items: as far as they have come.
    """

    def __init__(self, new_id: Callable[[], str], call_items: Mapping[str, CallItem]) -> None:
        """Begin with none; `new_id` gives calls their ids, and `call_items` says what they are told as."""
        self.items: list[Told] = []
        self._new_id = new_id
        self._call_items = call_items
        self._input: CustomInput | None = None  # of a custom tool's call that comes
        self._kind: type | None = None
        self._parts: list[str] = []
        self._logprobs = JsonList()

    def take(self, event: Event, logprobs: Sequence[Told] = ()) -> list[Told]:
        """The events that tell of what was found, and of the log probabilities of a text's tokens."""
        told: list[Told] = []
        if isinstance(event, CallBegin):
            told += [*self.close(), *self._open_call(event)]
        elif not isinstance(event, self._kind or CallBegin):
            told += [*self.close(), *self._open(type(event))]
        if isinstance(event, CallBegin):
            return told
        if isinstance(event, Arguments):
            return [*told, *self._take_arguments(event.text)]
        self._parts.append(event.text)
        if isinstance(event, Reasoning):
            return [*told, self._event("response.reasoning_text.delta", content_index=0, delta=event.text)]
        self._logprobs.extend(logprobs)
        delta = self._event("response.output_text.delta", content_index=0, delta=event.text, logprobs=[*logprobs])
        return [*told, delta]

    def close(self, status: str = "completed") -> list[Told]:
        """The events of the end of the item that comes, if one does."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind is Arguments:
            return [*self._close_call(item), self._item_event("response.output_item.done")]
        text, self._parts = "".join(self._parts), []
        self._part["text"], others = text, Told()
        if kind is Text:
            self._part["logprobs"], self._logprobs = self._logprobs.whole(), JsonList()
            others["logprobs"] = self._part["logprobs"]
        name = "response.reasoning_text.done" if kind is Reasoning else "response.output_text.done"
        told = [self._event(name, content_index=0, text=text, **others)]
        told.append(self._event("response.content_part.done", content_index=0, part=dict(self._part)))
        return [*told, self._item_event("response.output_item.done")]

    @property
    def _part(self) -> Told:
        part: Told = self.items[-1]["content"][0]
        return part

    def _open(self, kind: type) -> list[Told]:
        part: Told
        item: Told
        self._kind = kind
        if kind is Reasoning:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _id("msg"), "type": "message", "role": "assistant"}
        self.items.append({**item, "status": "in_progress", "content": []})
        told = [self._item_event("response.output_item.added")]
        self.items[-1]["content"] = [part]
        return [*told, self._event("response.content_part.added", content_index=0, part=_copied(part))]

    def _open_call(self, begin: CallBegin) -> list[Told]:
        self._kind = Arguments
        call = self._call_items.get(begin.name) or CallItem("function", begin.name)
        prefix, own = _CALLS[call.kind]
        item: Told = {"id": _id(prefix), **own, "call_id": begin.call_id or self._new_id(), "status": "in_progress"}
        if call.kind in ("function", "custom"):
            item["name"] = call.name
        if call.namespace is not None:
            item["namespace"] = call.namespace
        self._input = CustomInput() if call.kind == "custom" else None
        self.items.append(item)
        return [self._item_event("response.output_item.added")]

    def _take_arguments(self, text: str) -> list[Told]:
        if self._input is not None:
            text = self._input.feed(text)
        self._parts.append(text)
        name = _DELTAS.get(self.items[-1]["type"])
        return [self._event(name, delta=text)] if text and name else []

    def _close_call(self, item: Told) -> list[Told]:
        """The events of the end of a call, whose item has its arguments then."""
        told: list[Told] = []
        if self._input is not None:
            rest, self._input = self._input.finish(), None
            self._parts.append(rest)
            told = [self._event(_DELTAS["custom_tool_call"], delta=rest)] if rest else []
        text, self._parts = "".join(self._parts), []
        if item["type"] == "function_call":
            item["arguments"] = text
            return [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        if item["type"] == "custom_tool_call":
            item["input"] = text
            return [*told, self._event("response.custom_tool_call_input.done", input=text)]
        if item["type"] == "tool_search_call":
            item["arguments"] = _object(text)
        else:
            item["action"] = _shell_action(_object(text))
        return []

    def _event(self, type_: str, **others: Any) -> Told:
        return {"type": type_, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **others}

    def _item_event(self, name: str) -> Told:
        return {"type": name, "output_index": len(self.items) - 1, "item": _copied(self.items[-1])}


def _copied(value: Told) -> Told:
    """So that it stays as it is told."""
    return {key: [*item] if isinstance(item, list) else item for key, item in value.items()}


def _object(text: str) -> Told:
    try:
        found = json.loads(text or "{}")
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {_INVALID: text}
    return found if isinstance(found, dict) else {_INVALID: text}


def _shell_action(arguments: Told) -> Told:
    """What a client's shell is to run; nothing where the model has not written a command."""
    command = arguments.get("command")
    is_command = isinstance(command, list) and all(isinstance(word, str) for word in command)
    action: Told = {"type": "exec", "command": command if is_command else [], "env": {}}
    if isinstance(arguments.get("working_directory"), str):
        action["working_directory"] = arguments["working_directory"]
    if type(arguments.get("timeout_ms")) is int:
        action["timeout_ms"] = arguments["timeout_ms"]
    return action


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
