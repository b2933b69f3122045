"""Anthropic's Messages API over the frontend: /v1/messages, /v1/messages/count_tokens, answers, whole or as events, and
errors in its shape.

Thoughts, text and calls become content blocks. Answers are sent as OpenAI's are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import override

from launch.serve.admission.refusals import HTTP_STATUS, Refusal, retry_headers
from launch.serve.api.anthropic.requests import THREAD
from launch.serve.api.openai.answers import ChatAnswer
from launch.serve.api.openai.api import OpenAIApi
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.output.formats import TOOL_FORMATS, new_id
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event, Reasoning, Text
from launch.serve.api.openai.output.parsing import ChoiceParser
from launch.serve.frontend.frontend import Frontend, Usage
from launch.serve.http.answers import answer_in_parts, event
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Endpoint, Keys, unless_gone
from launch.serve.parsing.parsers import ParsedAnswer
from trtrun.core.outputs import CompletionDelta

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
            block = {"type": "tool_use", "id": event.call_id or self._new_id(), "name": event.name, "input": {}}
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


_ENCODER = msgspec.json.Encoder()
_ERROR_TYPES = {"server_error": "api_error"}
"""Types of errors in a stream, where they are not OpenAI's."""


class MessageAnswer(ChatAnswer):
    """The answer to /v1/messages."""

    prefix = "msg_"
    last_words = ()
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    @override
    def prepare(self, answering: Answering) -> None:
        super().prepare(answering)
        parsing = answering.parsing
        make_id = TOOL_FORMATS[parsing.tools].new_id if parsing.tools else new_id
        self._parser = ChoiceParser(parsing)
        self._content = Blocks(lambda: make_id().replace("call_", "toolu_", 1))
        self._echoed = {name: msgspec.Raw(value.encode()) for name, value in answering.echoed.items()}
        self._reason: str | None = None
        self._stop: str | None = None

    @override
    def keep(self, delta: CompletionDelta) -> None:
        self._take(delta)

    @override
    def whole(self, usage: Usage, draft_len: int) -> Iterator[bytes]:
        yield _ENCODER.encode({**self._message(usage), **self._echoed})

    @override
    def beginning(self) -> list[Told]:
        return [{"type": "message_start", "message": self._message(self._so_far)}]

    @override
    def chunks(self, delta: CompletionDelta) -> list[Told]:
        return self._take(delta)

    @override
    def ending(self, usage: Usage, draft_len: int) -> list[Told]:
        told = {"type": "message_delta", "delta": self._why_ended(), "usage": _tell_usage(usage), **self._echoed}
        return [told, {"type": "message_stop"}]

    @override
    def failure(self, error: Told) -> Told:
        kind = error["error"]["type"]
        return {
            "type": "error",
            "error": {"type": _ERROR_TYPES.get(kind, kind), "message": error["error"]["message"]},
        }

    @override
    def event(self, told: Told) -> bytes:
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


PREFIX = "/v1/messages"

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type of each status; others are invalid_request_error."""

_NO_THREADS: Mapping[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""Details by which Anthropic's clients know that they have to send a conversation as a whole each time."""


class MessagesApi:
    """The endpoints."""

    def __init__(self, chats: OpenAIApi, frontend: Frontend, keys: Keys, bodies: Bodies) -> None:
        self._chats = chats
        self._frontend = frontend
        self._keys = keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """The API's routes, for the application."""
        return [
            Route(PREFIX, Endpoint(self.messages), methods=["POST"]),
            Route(f"{PREFIX}/count_tokens", Endpoint(self.count_tokens), methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._chats.answer_aside(request, "message", MessageAnswer)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        self._keys.check(request)
        with await self._bodies.read(request) as body:
            found = await unless_gone(request, self._frontend.read("count", body.content, time.perf_counter()))
        assert isinstance(found, ParsedAnswer)
        return answer_in_parts([found.content])


def is_below(request: Request) -> bool:
    """Whether a request, to whatever path, is to this protocol."""
    return request.url.path == PREFIX or request.url.path.startswith(f"{PREFIX}/")


def error_body(message: str, status: int, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An error as Anthropic's clients read it, perhaps with details for programs."""
    error = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error if details is None else {**error, "details": details}}


def answer_refusal(refusal: Refusal) -> JSONResponse:
    """The HTTP answer to a request that is not answered."""
    line, status = str(refusal), HTTP_STATUS[refusal.kind]
    if refusal.code == "context_length_exceeded":
        line = line.removeprefix("the ")  # so Claude Code knows that it has to shorten the conversation
    details = _NO_THREADS if refusal.field == THREAD else None
    return JSONResponse(error_body(line, status, details), status_code=status, headers=retry_headers(refusal))
