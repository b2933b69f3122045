"""The output of a response: thoughts, messages and calls as items, and the events that tell of them as they come.

It knows what parsers find and the API's names. It does not know pieces, or how events travel.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from launch.serve.openai.answer_parts import JsonList
from launch.serve.openai.output.events import Arguments, CallBegin, Event, Reasoning, Text

Told = dict[str, Any]


class OutputItems:
    """The items of one response.

    Attributes:
        items: as far as they have come.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        """Begin with none; `new_id` gives calls their ids."""
        self.items: list[Told] = []
        self._new_id = new_id
        self._kind: type | None = None
        self._parts: list[str] = []
        self._logprobs = JsonList()

    def take(self, event: Event, logprobs: Sequence[Told] = ()) -> list[Told]:
        """The events that tell of what was found, and of the log probabilities of a text's tokens."""
        told: list[Told] = []
        if isinstance(event, CallBegin):
            told += [*self.close(), *self._open_call(event.name)]
        elif not isinstance(event, self._kind or CallBegin):
            told += [*self.close(), *self._open(type(event))]
        if isinstance(event, CallBegin):
            return told
        self._parts.append(event.text)
        if isinstance(event, Arguments):
            return [*told, self._event("response.function_call_arguments.delta", delta=event.text)]
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
        item, text = self.items[-1], "".join(self._parts)
        self._parts = []
        item["status"] = status
        if kind is Arguments:
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            told = [self._event(name, arguments=text, name=item["name"])]
        else:
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

    def _open_call(self, name: str) -> list[Told]:
        self._kind = Arguments
        self.items.append(
            {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": self._new_id(),
                "name": name,
                "arguments": "",
                "status": "in_progress",
            }
        )
        return [self._item_event("response.output_item.added")]

    def _event(self, type_: str, **others: Any) -> Told:
        return {"type": type_, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **others}

    def _item_event(self, name: str) -> Told:
        return {"type": name, "output_index": len(self.items) - 1, "item": _copied(self.items[-1])}


def _copied(value: Told) -> Told:
    """So that it stays as it is told."""
    return {key: [*item] if isinstance(item, list) else item for key, item in value.items()}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
