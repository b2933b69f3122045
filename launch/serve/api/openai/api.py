"""The OpenAI API over the frontend: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, and errors in its
shape.

An endpoint reads as it works: body → call → generation → answer, or one event for each piece.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.admission.event_loop_stalls import YieldTimer
from launch.serve.admission.refusals import HTTP_STATUS, Kind, Refusal, retry_headers
from launch.serve.api.openai.answers import Answer, ChatAnswer, CompletionAnswer
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.responses.answers import ResponseAnswer
from launch.serve.frontend.frontend import Frontend, Generation
from launch.serve.http.answers import EventStream, LastEvents, answer_in_parts, make_parts
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Endpoint, Keys, unless_gone
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import Failure
from launch.serve.parsing.parsers import ParsedRequest, UnencodedRequest
from trtrun.core.outputs import CompletionDelta

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

ROW_ENDPOINTS: Mapping[str, tuple[str, type[Answer]]] = {
    "/v1/completions": ("completion", CompletionAnswer),
    "/v1/chat/completions": ("chat", ChatAnswer),
    "/v1/responses": ("response", ResponseAnswer),
}
"""Endpoints whose requests may be rows of a batch: their kinds, of `parsing.messages.Task`, and answers."""

T = TypeVar("T")
_Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]


class _Begun(NamedTuple):
    """A request in work, and how it wants its answer."""

    generation: Generation
    answering: Answering


class OpenAIApi:
    """The endpoints below /v1."""

    def __init__(
        self, frontend: Frontend, keys: Keys, bodies: Bodies, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Answer for a frontend; `defaults` is sampling of the model where a request does not say it."""
        self._frontend = frontend
        self._keys = keys
        self._bodies = bodies
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """The API's routes, for the application."""
        return [
            Route("/v1/completions", Endpoint(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(self.chat_completions), methods=["POST"]),
            Route("/v1/responses", Endpoint(self.responses), methods=["POST"]),
            Route("/v1/responses/{response_id:path}", self.response),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def completions(self, request: Request) -> Response:
        """Go on with prompts."""
        return await self._answer(request, "completion", CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self.answer_aside(request, "chat", ChatAnswer)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer words."""
        return await self.answer_aside(request, "response", ResponseAnswer)

    async def response(self, request: Request) -> Response:
        """Refuse to find an earlier response: none is kept."""
        self._keys.check(request)
        line = "responses are not kept here: send the whole conversation as input, to /v1/responses"
        raise Refusal(Kind.UNKNOWN_MODEL, line, code="unsupported_endpoint")

    async def models(self, request: Request) -> Response:
        """The one model, and its adapters."""
        self._keys.check(request)
        models = [self._model(), *map(self._model, self._frontend.adapters)]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": models, **ends})

    async def model(self, request: Request) -> Response:
        """The one model, or an adapter, by its name."""
        self._keys.check(request)
        name = request.path_params["name"]
        if name in self._frontend.adapters:
            return JSONResponse(self._model(name))
        if name != self._frontend.model_name:
            alone = "" if self._frontend.adapters else " alone"
            known = ", ".join(map(repr, [self._frontend.model_name, *self._frontend.adapters]))
            raise Refusal(Kind.UNKNOWN_MODEL, f"this server has the model {known}{alone}", code="model_not_found")
        return JSONResponse(self._model())

    async def answer_aside(self, request: Request, kind: str, answer: type[Answer]) -> Response:
        """Answer a request that is or becomes a chat: a worker parses it, however short it is, for nobody knows how
        long a chat template works. Kinds are those of `parsing.messages.Task`."""
        try:
            return await self._answer(request, kind, answer)
        except Refusal as refusal:
            raise in_words_of(kind, refusal) from None

    async def _answer(self, request: Request, kind: str, answer_type: type[Answer]) -> Response:
        """Make a body's answer, counted as a request for the one model."""
        self._keys.check(request)
        counted = self._frontend.metrics.models.begin(self._frontend.model_name)
        try:
            with await self._bodies.read(request) as body:
                begun = await self._begin(kind, body.content, counted, partial(unless_gone, request))
            answer = self._make_answer(answer_type, begun)
            if begun.answering.stream:
                return self._stream(begun.generation, answer, counted)
            return answer_in_parts(await self._finish(begun, answer, counted, partial(unless_gone, request)))
        except ClientDisconnect:
            counted.fail(Failure.CANCELED)
            raise
        except BaseException as error:
            counted.fail_with(error)
            raise

    async def answer_row(self, path: str, body: bytes) -> bytes:
        """The whole answer to a request that is a row of a batch.

        Args:
            path: of its endpoint.
            body: JSON.

        Raises:
            Refusal: it is not answered.
        """
        kind, answer_type = ROW_ENDPOINTS[path]
        counted = self._frontend.metrics.models.begin(self._frontend.model_name)
        try:
            begun = await self._begin(kind, body, counted, _wait, may_stream=False)
            answer = self._make_answer(answer_type, begun)
            return b"".join(await self._finish(begun, answer, counted, _wait))
        except Refusal as refusal:
            counted.fail_with(refusal)
            raise in_words_of(kind, refusal) from None
        except BaseException as error:
            counted.fail_with(error)
            raise

    async def _begin(
        self, kind: str, body: bytes, counted: ModelRequest, wait: _Wait, may_stream: bool = True
    ) -> _Begun:
        """Read a body and have it completed; `wait` says while what it is waited for."""
        arrived = time.perf_counter()
        found: object = self._frontend.parse_in_loop(kind, body)
        if found is None:
            found = await wait(self._frontend.read(kind, body, arrived))
        assert isinstance(found, ParsedRequest | UnencodedRequest)
        answering = answering_of(found)
        if not may_stream:
            check_row(answering)
        generation = await self._frontend.begin(found, arrived)
        counted.num_inferences = len(found.prompts) * answering.sampling.n
        counted.enter(Stage.INFER)
        return _Begun(generation, answering)

    def _make_answer(self, answer_type: type[Answer], begun: _Begun) -> Answer:
        frontend, answering = self._frontend, begun.answering
        model = answering.sampling.lora_name or frontend.model_name
        return answer_type(model, frontend.tokenizer, answering, begun.generation.prompts, frontend.end_token_ids)

    async def _finish(self, begun: _Begun, answer: Answer, counted: ModelRequest, wait: _Wait) -> list[bytes]:
        """The parts of a whole answer."""
        generation = begun.generation
        try:
            await wait(_collect(generation, answer, counted))
        finally:
            generation.close()
        counted.move_to_queue(generation.queue_seconds)
        counted.enter(Stage.OUTPUT)
        with counted:
            parts = answer.whole(generation.usage, self._frontend.draft_len)
            # As many numbers as prompts are long take too long for the event loop.
            is_long = begun.answering.prompt_logprobs is not None
            return await (asyncio.to_thread(list, parts) if is_long else make_parts(parts))

    def _stream(self, generation: Generation, answer: Answer, counted: ModelRequest) -> Response:
        def close() -> None:
            generation.close()
            counted.fail(Failure.CANCELED)  # unless it has ended

        return EventStream(close, self._events(generation, answer, counted), self._frontend.ping_seconds, answer.ping)

    async def _events(
        self, generation: Generation, answer: Answer, counted: ModelRequest
    ) -> AsyncGenerator[bytes, None]:
        """Yield an event for each piece, the usage, and the end. An error is an event, too: the status is
        out."""
        if beginning := answer.beginning():
            yield b"".join(map(answer.event, beginning))
        yield_timer = YieldTimer()
        try:
            while pieces := await generation.take():
                counted.begin_answer()
                events: list[bytes] = []
                yield_timer.restart()
                for piece in pieces:
                    events += await _work(piece, lambda piece: list(map(answer.event, answer.chunks(piece))))
                    await yield_timer.yield_if_due()
                if generation.is_over:
                    counted.move_to_queue(generation.queue_seconds)
                    counted.succeed()
                    last = answer.ending(generation.usage, self._frontend.draft_len)
                    events += [*map(answer.event, last), *answer.last_words]
                    yield LastEvents(b"".join(events))
                elif events:
                    yield b"".join(events)
        except Refusal as refusal:
            counted.fail_with(refusal)
            self._frontend.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            yield LastEvents(b"".join([answer.event(answer.failure(error_body(refusal))), *answer.last_words]))

    def _model(self, adapter: str | None = None) -> dict[str, Any]:
        """The one model, or an adapter of it, for OpenAI's clients and for Anthropic's."""
        limits = self._frontend.client.limits
        parent = {} if adapter is None else {"parent": self._frontend.model_name}
        name = adapter or self._frontend.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtrun",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "max_model_len": None if limits is None else limits.max_length,
            **parent,
        }


async def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Wait for it, whoever is gone."""
    return await work


def check_row(answering: Answering) -> None:
    """Raise a Refusal where a row of a batch wants an answer that no file has."""
    if answering.stream:
        raise Refusal(Kind.INVALID, "stream: rows of a batch are answered as a whole: leave it out", "stream")


def in_words_of(kind: str, refusal: Refusal) -> Refusal:
    """A refusal that names the field of a chat that its prompt was made of."""
    if refusal.field == "prompt" and kind != "completion":
        refusal.field = "input" if kind == "response" else "messages"
    return refusal


def answering_of(found: ParsedRequest | UnencodedRequest) -> Answering:
    """How a request is to be answered, whoever has parsed it."""
    if isinstance(found, UnencodedRequest):
        assert isinstance(found.others, Answering)
        return found.others
    return replace(msgspec.convert({**found.others, "sampling": {}}, Answering), sampling=found.sampling[0])


def error_body(refusal: Refusal) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it."""
    kind = _TYPES[refusal.kind]
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.field, "code": refusal.code}}


def answer_refusal(refusal: Refusal) -> JSONResponse:
    """The HTTP answer to a request that is not answered."""
    return JSONResponse(error_body(refusal), status_code=HTTP_STATUS[refusal.kind], headers=retry_headers(refusal))


async def _collect(generation: Generation, answer: Answer, counted: ModelRequest) -> None:
    """Have an answer keep all pieces."""
    yield_timer = YieldTimer()
    async for piece in generation:
        counted.begin_answer()
        await _work(piece, answer.keep)
        await yield_timer.yield_if_due()


async def _work(piece: CompletionDelta, work: Callable[[CompletionDelta], T]) -> T:
    """Do something with a piece: beside the event loop where a prompt's log probabilities are to be written down, which
    are as many as the prompt is long."""
    return work(piece) if piece.prompt_logprobs is None else await asyncio.to_thread(work, piece)
