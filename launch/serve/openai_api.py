"""The OpenAI API over the front: /v1/completions, /v1/chat/completions, /v1/models, and errors in its shape.

An endpoint reads as it works: body → call → generation → answer, or one event for each piece. It knows HTTP through
Starlette, and nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.aside import SHORT_TEXT, aside
from launch.serve.bodies import Bodies
from launch.serve.chat_template import ChatTemplate
from launch.serve.event_stream import EventStream, LastEvents, event
from launch.serve.front import Front, Generation, Piece
from launch.serve.http_requests import Endpoint, Keys, read_json, unless_gone
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import Failure
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
    Kind.TIMEOUT: "timeout_error",
}
"""OpenAI's type of each kind."""

_ENCODER = msgspec.json.Encoder()
_DONE = event(b"[DONE]")


@dataclass(frozen=True)
class _Asked:
    """What a body asks for, whatever the endpoint."""

    prompts: Sequence[Prompt]
    answering: Answering


class OpenAIApi:
    """The endpoints below /v1."""

    def __init__(self, front: Front, template: ChatTemplate | None, keys: Keys, bodies: Bodies) -> None:
        self._front = front
        self._template = template
        self._keys = keys
        self._bodies = bodies
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/v1/completions", Endpoint(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(self.chat_completions), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def completions(self, request: Request) -> Response:
        """Go on with prompts."""
        return await self._answer(request, self._read_completion, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, self._read_chat, ChatAnswer)

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

    async def _read_completion(self, body: bytes) -> _Asked:
        call = await read_json(body, partial(read_completion, model_name=self._front.model_name))
        return _Asked(call.prompts, call.answering)

    async def _read_chat(self, body: bytes) -> _Asked:
        call = await read_json(body, partial(read_chat, model_name=self._front.model_name))
        return _Asked([await self._chat_prompt(call)], call.answering)

    async def _answer(
        self, request: Request, read: Callable[[bytes], Awaitable[_Asked]], kind: type[Answer]
    ) -> Response:
        """From a body to its answer, counted as a request for the one model."""
        self._keys.check(request)
        counted = self._front.metrics.models.begin(self._front.model_name)
        try:
            with await self._bodies.read(request) as body:
                arrived = time.perf_counter()
                asked = await read(body.content)
                generation = await self._front.begin(asked.prompts, asked.answering.sampling, arrived)
            counted.num_inferences = len(asked.prompts) * asked.answering.sampling.n
            counted.enter(Stage.INFER)
            answer = kind(self._front.model_name, self._front.tokenizer, asked.answering, generation.prompts)
            if asked.answering.stream:
                return self._stream(generation, answer, counted)
            try:
                pieces = await unless_gone(request, _collect(generation))
            finally:
                generation.close()
            counted.move_to_queue(generation.queue_seconds)
            counted.enter(Stage.OUTPUT)
            with counted:
                return JSONResponse(answer.whole(pieces, generation.usage, self._front.draft_len))
        except ClientDisconnect:
            counted.fail(Failure.CANCELED)
            raise
        except BaseException as error:
            counted.fail_with(error)
            raise

    def _stream(self, generation: Generation, answer: Answer, counted: ModelRequest) -> Response:
        return EventStream(_Streaming(generation, counted), self._events(generation, answer, counted))

    async def _events(
        self, generation: Generation, answer: Answer, counted: ModelRequest
    ) -> AsyncGenerator[bytes, None]:
        """One event for each piece, what the request took, and the end. An error is an event, too: the status is
        out."""
        if beginning := answer.beginning():
            yield b"".join(map(_event, beginning))
        try:
            while pieces := await generation.take():
                events = [_event(told) for piece in pieces if (told := answer.chunk(piece)) is not None]
                if generation.is_over:
                    counted.move_to_queue(generation.queue_seconds)
                    counted.succeed()
                    last = answer.usage_chunk(generation.usage, self._front.draft_len)
                    events += [_DONE] if last is None else [_event(last), _DONE]
                    yield LastEvents(b"".join(events))
                elif events:
                    yield b"".join(events)
        except Refusal as refusal:
            counted.fail_with(refusal)
            self._front.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            yield LastEvents(_event(error_body(refusal)) + _DONE)

    async def _chat_prompt(self, call: ChatCall) -> Prompt:
        """The tokens of a conversation."""
        if self._template is None or self._front.tokenizer is None:
            raise Refusal(
                Kind.INVALID,
                f"the model {self._front.model_name!r} has no chat template: use /v1/completions, or add "
                "chat_template.jinja to its tokenizer's directory",
                code="no_chat_template",
            )
        self._front.door.check_open()  # before work that would be for nothing
        is_long = sum(len(message["content"]) for message in call.messages) > SHORT_TEXT
        try:
            return await aside(is_long, _encode_chat, self._template, self._front.tokenizer, call.messages)
        except InvalidRequestError as error:
            raise Refusal(Kind.INVALID, str(error), "messages") from None

    def _model(self) -> dict[str, Any]:
        return {"id": self._front.model_name, "object": "model", "created": self._created, "owned_by": "trtrun"}


@dataclass(frozen=True)
class _Streaming:
    """A stream's request at work, and its count."""

    generation: Generation
    counted: ModelRequest

    def close(self) -> None:
        """Give up what has not ended."""
        self.generation.close()
        self.counted.fail(Failure.CANCELED)  # unless it has ended


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
