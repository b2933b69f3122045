"""What vLLM has beside OpenAI's API: /tokenize and /detokenize; and what is refused by its name.

Bodies are read, and answered, by the processes that read requests, whatever their length. It knows HTTP through
Starlette, and no tokenizer.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.frontend.front import Front
from launch.serve.http.answers import answer_in_parts
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Endpoint, Keys, unless_gone
from launch.serve.parsing.readers import ReadAnswer


class TokenApi:
    """The endpoints."""

    def __init__(self, front: Front, keys: Keys, bodies: Bodies) -> None:
        self._front = front
        self._keys = keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/tokenize", Endpoint(self.tokenize), methods=["POST"]),
            Route("/detokenize", Endpoint(self.detokenize), methods=["POST"]),
            Route("/v1/embeddings", Endpoint(self.embeddings), methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a chat, and how many there may be."""
        content = await self._read("tokenize", request)
        length = self._front.most_prompt_tokens() + 1
        return answer_in_parts([b'{"max_model_len":%d,' % length, content[1:]])

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return answer_in_parts([await self._read("detokenize", request)])

    async def embeddings(self, request: Request) -> Response:
        """None are made here."""
        self._keys.check(request)
        raise Refusal(
            Kind.UNKNOWN_MODEL,
            "embeddings are not made here: this server completes texts with a language model; ask a server of an "
            "embedding model",
            code="unsupported_endpoint",
        )

    async def _read(self, kind: str, request: Request) -> bytes:
        self._keys.check(request)
        with await self._bodies.read(request) as body:
            found = await unless_gone(request, self._front.read(kind, body.content, time.perf_counter()))
        assert isinstance(found, ReadAnswer)
        return found.content
