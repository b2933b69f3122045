"""vLLM's endpoints beside OpenAI's: /tokenize, /detokenize, /v1/load_lora_adapter and /v1/unload_lora_adapter (with a
key); and those that are refused by name.

Bodies of /tokenize and /detokenize are read and answered by the parser workers, whatever their length.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.frontend.adapters import AdapterDesk
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.answers import answer_in_parts
from launch.serve.http.bodies import Bodies, parse_json
from launch.serve.http.requests import Endpoint, Keys, unless_gone
from launch.serve.parsing.parsers import ParsedAnswer
from trtrun.core.values import show_value
from trtrun.errors import nearest


class TokenApi:
    """The endpoints."""

    def __init__(self, frontend: Frontend, keys: Keys, bodies: Bodies) -> None:
        self._frontend = frontend
        self._keys = keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """The endpoints' routes, for the application."""
        return [
            Route("/tokenize", Endpoint(self.tokenize), methods=["POST"]),
            Route("/detokenize", Endpoint(self.detokenize), methods=["POST"]),
            Route("/v1/embeddings", Endpoint(self.embeddings), methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a chat, and how many there may be."""
        content = await self._read("tokenize", request)
        length = self._frontend.most_prompt_tokens() + 1
        return answer_in_parts([b'{"max_model_len":%d,' % length, content[1:]])

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return answer_in_parts([await self._read("detokenize", request)])

    async def embeddings(self, request: Request) -> Response:
        """Refuse to make embeddings."""
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
            found = await unless_gone(request, self._frontend.read(kind, body.content, time.perf_counter()))
        assert isinstance(found, ParsedAnswer)
        return found.content


_NEUTRAL: dict[str, tuple[Any, ...]] = {"load_inplace": (False,)}
"""Fields of vLLM, with the values that ask for nothing."""

_IGNORED = ("lora_int_id",)


class AdapterApi:
    """The endpoints."""

    def __init__(self, desk: AdapterDesk, keys: Keys, bodies: Bodies) -> None:
        self._desk = desk
        self._keys = keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """The endpoints' routes, for the application."""
        return [
            Route("/v1/load_lora_adapter", Endpoint(self.load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", Endpoint(self.unload), methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Load an adapter, and answer when requests may name it."""
        name, path = await self._read(request, ("lora_name", "lora_path"))
        await unless_gone(request, self._desk.load(name, path))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Have requests name an adapter no more."""
        (name,) = await self._read(request, ("lora_name",))
        await unless_gone(request, self._desk.drop(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(self, request: Request, wanted: Collection[str]) -> list[str]:
        """The texts of a body, by their names."""
        self._keys.check(request)
        with await self._bodies.read(request) as body:
            values = parse_json(body.content)
        if not isinstance(values, dict):
            raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
        for name, value in values.items():
            if name in wanted or name in _IGNORED or value is None or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise Refusal(Kind.INVALID, f"{name} is not supported here: leave it out", name, "unsupported_field")
            raise Refusal(
                Kind.INVALID, f"unknown field {show_value(name)}{nearest(name, wanted)}", None, "unknown_field"
            )
        for name in wanted:
            if not isinstance(values.get(name), str):
                raise Refusal(Kind.INVALID, f"{name} must be a text, not {show_value(values.get(name))}", name)
        return [values[name] for name in wanted]
