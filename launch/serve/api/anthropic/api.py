"""Anthropic's Messages API over the frontend: /v1/messages, /v1/messages/count_tokens, and errors in its shape.

Answers are made as OpenAI's are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.admission.refusals import HTTP_STATUS, Refusal, retry_headers
from launch.serve.api.anthropic.answers import MessageAnswer
from launch.serve.api.anthropic.requests import THREAD
from launch.serve.api.openai.api import OpenAIApi
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.answers import answer_in_parts
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Endpoint, Keys, unless_gone
from launch.serve.parsing.parsers import ParsedAnswer

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
