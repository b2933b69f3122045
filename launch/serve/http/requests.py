"""What every HTTP request goes through before and after its endpoint: an id, a key, a look at who is gone.

Errors raised here are Refusals, which the application turns into answers of each protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serve.admission.control import OWNER, owner_of_address
from launch.serve.admission.refusals import Kind, Refusal
from trtrun.errors import ConfigError, wrap_errors

T = TypeVar("T")

REQUEST_ID = "x-request-id"
_NAMES_OF_IDS: Mapping[bool, Sequence[str]] = {False: (REQUEST_ID,), True: (REQUEST_ID, "request-id")}
"""Headers of answers with the id of the request, by whether Anthropic's client asks, which reads another one."""

_LONGEST_ID = 128
_MOST_KEY_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class RequestLog:
    """Gives each request an id, the client's own where it has one, and logs how it ended: nothing of its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; ASGI's interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        request_id = choose_id(sent.get(REQUEST_ID, ""))
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in _NAMES_OF_IDS["anthropic-version" in sent]:
                    headers[name] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            path = scope["path"][:200].encode("unicode_escape").decode()
            # A page that is looked at asks every second.
            level = logging.DEBUG if path == "/status" and status == 200 else logging.INFO
            logger.log(level, "%s: %s %s: %d after %.3f s", request_id, scope["method"], path, status, seconds)


class Slashless:
    """Takes slashes off the ends of paths: clients join a base that ends with one to a path, or end a path with one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; ASGI's interface."""
        path = scope.get("path", "")
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class Endpoint:
    """A function of a request, for Starlette's routes: without the second look at exceptions, behind the application's
    own, that Starlette has around functions and that each part of an answer goes through."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; ASGI's interface."""
        answer = await self._answer(Request(scope, receive, send))
        await answer(scope, receive, send)


def choose_id(given: str) -> str:
    """A request's id: the client's own where it can stand in answers and logs, else a new one."""
    is_fit = 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable()
    return given if is_fit else secrets.token_hex(16)


class Keys:
    """The API keys of a server; none lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that comparing them takes one time, whatever is sent.
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """Read keys, one a line; empty lines do not count.

        Raises:
            ConfigError: the file cannot be read, is too large, or holds no key, or one that no header can hold.
        """
        if path is None:
            return cls(())
        with wrap_errors(path, ConfigError), path.open("rb") as opened:
            content = opened.read(_MOST_KEY_BYTES + 1)
        if len(content) > _MOST_KEY_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_KEY_BYTES} bytes: that is no file of API keys, one a line")
        keys = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            key = line.decode("ascii", errors="replace").strip()
            if not (key.isascii() and (not key or key.isprintable())):
                raise ConfigError(f"{path}, line {number}: an API key has printable ASCII characters alone")
            keys += [key] if key else []
        if not keys:
            raise ConfigError(f"{path} holds no API key: write one a line")
        return cls(keys)

    @property
    def are_needed(self) -> bool:
        """Whether there are any."""
        return bool(self._digests)

    @property
    def have_several(self) -> bool:
        """Whether there are several."""
        return len(self._digests) > 1

    def check(self, request: Request) -> str:
        """Raise a Refusal unless the request has one of the keys, as `Authorization: Bearer KEY` or, as Anthropic's
        clients send it, `x-api-key: KEY`; and note whose it is (`admission.control`).

        Returns:
            A name of the key that stays the same when the server is started again with others beside it, and does not
            tell the key; empty without keys.
        """
        if not self._digests:
            OWNER.set(owner_of_address(request.client.host if request.client is not None else ""))
            return ""
        try:
            return self.check_header(request.headers.get("authorization", ""))
        except Refusal:
            key = request.headers.get("x-api-key")
            if key is None:
                raise
            return self.check_header(f"Bearer {key}")

    def check_header(self, authorization: str) -> str:
        """The same for the value of that header, which is empty if it is missing. Without keys it notes nothing."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        # No early end: how long it takes does not tell which key it was.
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not key.strip():
            line = "this server wants an API key, as the header Authorization: Bearer KEY"
            raise Refusal(Kind.UNAUTHORIZED, line, code="invalid_api_key")
        if not any(found):
            line = "this server wants an API key of its own: the one that was sent is unknown here"
            raise Refusal(Kind.UNAUTHORIZED, line, code="invalid_api_key")
        number = found.index(True)
        OWNER.set(f"key {number}")
        return self._digests[number].hex()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and give it up when the client goes away.

    Raises:
        ClientDisconnect: it has.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    receive: Awaitable[Message]
    while True:
        receive = request.receive()
        if (await receive)["type"] == "http.disconnect":
            return


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
