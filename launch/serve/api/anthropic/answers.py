"""Answers to /v1/messages: pieces of a completion become a message, whole or as its events.

It knows pieces and the API's names. It does not know how answers travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from launch.serve.api.anthropic.blocks import Blocks, Told
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.chat_answers import ChatAnswer
from launch.serve.api.openai.output.formats import TOOL_FORMATS, new_id
from launch.serve.api.openai.output.parsing import ChoiceParser
from launch.serve.frontend.front import Usage
from launch.serve.http.answers import event
from trtrun.core.outputs import CompletionDelta

_ENCODER = msgspec.json.Encoder()
_ERROR_TYPES = {"server_error": "api_error"}
"""Of errors in a stream, where they are not OpenAI's."""


class MessageAnswer(ChatAnswer):
    """The answer to /v1/messages."""

    prefix = "msg_"
    last_words = ()
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def prepare(self, answering: Answering) -> None:
        """See `Answer`."""
        super().prepare(answering)
        parsing = answering.parsing
        make_id = TOOL_FORMATS[parsing.tools].new_id if parsing.tools else new_id
        self._parser = ChoiceParser(parsing)
        self._content = Blocks(lambda: make_id().replace("call_", "toolu_", 1))
        self._echoed = {name: msgspec.Raw(value.encode()) for name, value in answering.echoed.items()}
        self._reason: str | None = None
        self._stop: str | None = None

    def keep(self, delta: CompletionDelta) -> None:
        """See `Answer`."""
        self._take(delta)

    def whole(self, usage: Usage, draft_len: int) -> Iterator[bytes]:
        """See `Answer`."""
        yield _ENCODER.encode({**self._message(usage), **self._echoed})

    def beginning(self) -> list[Told]:
        """See `Answer`."""
        return [{"type": "message_start", "message": self._message(self._so_far)}]

    def chunks(self, delta: CompletionDelta) -> list[Told]:
        """See `Answer`."""
        return self._take(delta)

    def ending(self, usage: Usage, draft_len: int) -> list[Told]:
        """See `Answer`."""
        told = {"type": "message_delta", "delta": self._why_ended(), "usage": _tell_usage(usage), **self._echoed}
        return [told, {"type": "message_stop"}]

    def failure(self, error: Told) -> Told:
        """See `Answer`."""
        kind = error["error"]["type"]
        return {
            "type": "error",
            "error": {"type": _ERROR_TYPES.get(kind, kind), "message": error["error"]["message"]},
        }

    def event(self, told: Told) -> bytes:
        """See `Answer`."""
        return f"event: {told['type']}\n".encode() + event(_ENCODER.encode(told))

    def _take(self, delta: CompletionDelta) -> list[Told]:
        """What a piece adds to the content."""
        is_end, text = delta.finish_reason is not None, delta.text
        if delta.finish_reason == "stop":
            text = self._cut_stop(text)
        told: list[Told] = []
        for found in self._parser.feed(text, is_end):
            told += self._content.take(found)
        if is_end:
            self._reason = delta.finish_reason
            told += self._content.close()
        return told

    def _cut_stop(self, text: str) -> str:
        """The end of a text without the stop string that ended it, which is the longest that stands there."""
        ends = [stop for stop in self._answering.sampling.stop if text.endswith(stop)]
        if not ends:
            return text
        self._stop = max(ends, key=len)
        return text.removesuffix(self._stop)

    def _why_ended(self) -> dict[str, str | None]:
        reason: str | None = None  # it has not
        if self._reason == "length":
            reason = "max_tokens"
        elif self._stop is not None:
            reason = "stop_sequence"
        elif self._reason is not None:
            reason = "tool_use" if self._content.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop}

    def _message(self, usage: Usage) -> Told:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": self._content.blocks,
            **self._why_ended(),
            "usage": _tell_usage(usage),
        }


def _tell_usage(usage: Usage) -> dict[str, Any]:
    """Tokens that were read, those from the cache apart, and written."""
    num_cached = usage.num_cached_prompt_tokens
    return {
        "input_tokens": usage.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.num_completion_tokens,
    }
