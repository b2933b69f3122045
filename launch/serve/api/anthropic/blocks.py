"""The content of a message: thoughts, texts and calls as blocks, and the events that tell of them as they come.

It knows what parsers find and the API's names. It does not know pieces, or how events travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from launch.serve.api.openai.output.events import Arguments, CallBegin, Event, Reasoning, Text

Told = dict[str, Any]

_INVALID = "INVALID_JSON"
"""The key under which Anthropic has clients send back what is no JSON:
https://platform.claude.com/docs/en/agents-and-tools/tool-use/fine-grained-tool-streaming"""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Blocks:
    """The blocks of one message.

    Attributes:
        blocks: those that are whole.
        has_calls: one of all is a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        """Begin with none; `new_id` gives calls their ids."""
        self.blocks: list[Told] = []
        self.has_calls = False
        self._new_id = new_id
        self._open: Told | None = None
        self._kind: type[Event] | None = None
        self._parts: list[str] = []

    def take(self, event: Event) -> list[Told]:
        """The events that tell of what was found."""
        told: list[Told] = []
        if isinstance(event, CallBegin):
            self.has_calls = True
            block = {"type": "tool_use", "id": self._new_id(), "name": event.name, "input": {}}
            return [*self.close(), self._begin(Arguments, block)]
        if not isinstance(event, self._kind or CallBegin):
            told += self.close()
            thoughts = {"type": "thinking", "thinking": "", "signature": ""}
            told.append(self._begin(type(event), {"type": "text", "text": ""} if isinstance(event, Text) else thoughts))
        self._parts.append(event.text)
        return [*told, {"type": "content_block_delta", "index": len(self.blocks), "delta": _delta(event)}]

    def close(self) -> list[Told]:
        """The event of the end of the block that comes, if one does."""
        block, self._open, self._kind = self._open, None, None
        if block is None:
            return []
        text, self._parts = "".join(self._parts), []
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        self.blocks.append(block)
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, kind: type[Event], block: Told) -> Told:
        self._kind, self._open = kind, block
        return {"type": "content_block_start", "index": len(self.blocks), "content_block": dict(block)}


def _delta(event: Text | Reasoning | Arguments) -> Told:
    if isinstance(event, Text):
        return {"type": "text_delta", "text": event.text}
    if isinstance(event, Reasoning):
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def _input(text: str) -> msgspec.Raw | Told:
    """Arguments as an object, as they are written. What is none, as where the text was cut, is in one as text."""
    if not text.strip():
        return {}
    try:
        _OBJECT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {_INVALID: text}
    return msgspec.Raw(text.encode())
