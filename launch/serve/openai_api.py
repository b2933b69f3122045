"""The OpenAI API over the front: /v1/completions, /v1/chat/completions, /v1/models, and errors in its shape.

An endpoint reads as it works: body → call → generation → answer, or one event for each piece. It knows HTTP through
Starlette, and nothing of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.chat_template import ChatTemplate
from launch.serve.event_stream import EventStream, event
from launch.serve.front import SHORT_TEXT, Front, Generation, Piece
from launch.serve.http_requests import Keys, read_json_body, unless_gone
from launch.serve.limits import client_gone
from launch.serve.openai_answers import Answer, ChatAnswer, CompletionAnswer
from launch.serve.openai_types import Answering, ChatCall, read_chat, read_completion
from launch.serve.refusals import HTTP_STATUS, Kind, Refusal, retry_headers
from trtrun.errors import InvalidRequestError
from trtrun.prompts import Prompt
from trtrun.text import Tokenizer

_TYPES: Mapping[Kind, str] = {
    Kind.INVALID: "invalid_request_error",
    Kind.UNAUTHORIZED: "authentication_error",
    Kind.UNKNOWN_MODEL: "invalid_request_error",
    Kind.TOO_LARGE: "invalid_request_error",
    Kind.BUSY: "rate_limit_error",
    Kind.FAILED: "server_error",
    Kind.UNAVAILABLE: "server_error",
    Kind.GONE: "invalid_request_error",
    Kind.TIMEOUT: "timeout_error",
}
"""OpenAI's type of each kind."""

_ENCODER = msgspec.json.Encoder()
_DONE = event(b"[DONE]")


class OpenAIApi:
    """The endpoints below /v1."""

    def __init__(self, front: Front, template: ChatTemplate | None, keys: Keys, max_body_bytes: int) -> None:
        self._front = front
        self._template = template
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def completions(self, request: Request) -> Response:
        """Go on with prompts."""
        self._keys.check(request)
        call = read_completion(await read_json_body(request, self._max_body_bytes), self._front.model_name)
        return await self._answer(request, call.prompts, call.answering, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        self._keys.check(request)
        call = read_chat(await read_json_body(request, self._max_body_bytes), self._front.model_name)
        return await self._answer(request, [await self._chat_prompt(call)], call.answering, ChatAnswer)

    async def models(self, request: Request) -> Response:
        """The one model."""
        self._keys.check(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._keys.check(request)
        name = request.path_params["name"]
        if name != self._front.model_name:
            raise Refusal(
                Kind.UNKNOWN_MODEL,
                f"this server has the model {self._front.model_name!r} alone",
                code="model_not_found",
            )
        return JSONResponse(self._model())

    async def _answer(
        self, request: Request, prompts: Sequence[Prompt], answering: Answering, kind: type[Answer]
    ) -> Response:
        generation = await self._front.begin(prompts, answering.sampling)
        answer = kind(self._front.model_name, self._front.tokenizer, answering, generation.prompts)
        if answering.stream:
            return EventStream(
                self._events(generation, answer), lambda: generation.give_up(client_gone()), generation.close
            )
        try:
            pieces = await unless_gone(request, _collect(generation))
        finally:
            generation.close()
        return JSONResponse(answer.whole(pieces, generation.usage, self._front.draft_len))

    async def _events(self, generation: Generation, answer: Answer) -> AsyncGenerator[bytes, None]:
        """One event for each piece, what the request took, and the end. An error is an event, too: the status is
        out."""
        if beginning := answer.beginning():
            yield b"".join(map(_event, beginning))
        try:
            while pieces := await generation.take():
                if events := b"".join([_event(told) for piece in pieces if (told := answer.chunk(piece)) is not None]):
                    yield events
        except Refusal as refusal:
            if refusal.kind is Kind.GONE:
                return
            self._front.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            yield _event(error_body(refusal)) + _DONE
        else:
            last = answer.usage_chunk(generation.usage, self._front.draft_len)
            yield (b"" if last is None else _event(last)) + _DONE

    async def _chat_prompt(self, call: ChatCall) -> Prompt:
        """The tokens of a conversation."""
        if self._template is None or self._front.tokenizer is None:
            raise Refusal(
                Kind.INVALID,
                f"the model {self._front.model_name!r} has no chat template: use /v1/completions, or add "
                "chat_template.jinja to its tokenizer's directory",
                code="no_chat_template",
            )
        length = sum(len(message["content"]) for message in call.messages)
        work = partial(_encode_chat, self._template, self._front.tokenizer, call.messages)
        try:
            return work() if length <= SHORT_TEXT else await asyncio.to_thread(work)
        except InvalidRequestError as error:
            raise Refusal(Kind.INVALID, str(error), "messages") from None

    def _model(self) -> dict[str, Any]:
        return {"id": self._front.model_name, "object": "model", "created": self._created, "owned_by": "trtrun"}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it."""
    kind = _TYPES[refusal.kind]
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.field, "code": refusal.code}}


def answer_refusal(refusal: Refusal) -> JSONResponse:
    """The HTTP answer to a request that is not answered."""
    return JSONResponse(error_body(refusal), status_code=HTTP_STATUS[refusal.kind], headers=retry_headers(refusal))


def _encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    # The template writes special tokens itself, that of the beginning, too.
    return tuple(tokenizer.encode(template.render(messages), add_special_tokens=False))


async def _collect(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation]


def _event(value: Mapping[str, Any]) -> bytes:
    return event(_ENCODER.encode(value))
