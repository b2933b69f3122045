"""The HTTP side of the frontend: two applications, one for requests and one for metrics, and the servers that run them.

It joins endpoints to an application and applications to sockets. It does not know protocols' requests (`openai.api`) or
what is counted (`metrics`).
"""

from __future__ import annotations

import asyncio
import difflib
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from launch.serve.admission.event_loop_stalls import MeasuredLoop
from launch.serve.admission.refusals import RETRY_SECONDS, Refusal, retry_headers
from launch.serve.api.anthropic import api as anthropic
from launch.serve.api.kserve import http_api as kserve
from launch.serve.api.openai import api as openai
from launch.serve.application.addresses import Listener
from launch.serve.application.status import describe_phases, metrics_route
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.connections import HEAD_SECONDS, Connections
from launch.serve.http.requests import REQUEST_ID, Keys, RequestLog, Slashless
from launch.serve.http.tls import TlsPort
from trtrun import __version__
from trtrun.configuration.process_sections import ServerSection

KEEP_ALIVE_SECONDS = 30
_CLIENT_CLOSED = 499


def make_application(frontend: Frontend, routes: Sequence[Route], allowed_origins: Sequence[str] = ()) -> Starlette:
    """What answers on the HTTP port: the routes of all protocols, and what they share.

    Args:
        frontend: behind it.
        routes: of the protocols.
        allowed_origins: of pages whose scripts may ask in a browser; * for all.
    """

    async def health(request: Request) -> Response:
        phases = describe_phases(frontend.client.standings())
        try:
            frontend.admission.check_open()
        except Refusal as refusal:
            told = {"status": refusal.code, "phases": phases}
            return JSONResponse(told, status_code=503, headers=retry_headers(refusal))
        return JSONResponse({"status": "ok", "phases": phases})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        protocol = next((one for one in (kserve, anthropic) if one.is_below(request)), openai)
        return _count(frontend, protocol.answer_refusal(error))

    async def refuse_http(request: Request, error: Exception) -> Response:
        """Refuse a path that there is not, or a method that it does not have."""
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        line = f"{request.method} {path}: {error.detail}{_hint(path, error.headers or {}, routes)}"
        return _count(frontend, _plain_error(request, line, error))

    async def pass_over(request: Request, error: Exception) -> Response:
        """The client is gone; nobody reads this."""
        return Response(status_code=_CLIENT_CLOSED)

    async def fail(request: Request, error: Exception) -> Response:
        """A defect, whose traceback is in the log."""
        return _count(frontend, _plain_error(request, "the server failed; its log says how", HTTPException(500)))

    application = Starlette(
        routes=[*routes, Route("/health", health, methods=["GET"]), Route("/version", version, methods=["GET"])],
        middleware=[Middleware(RequestLog), *_cross_origin(allowed_origins), Middleware(Slashless)],
        exception_handlers={
            Refusal: refuse,
            HTTPException: refuse_http,
            ClientDisconnect: pass_over,
            Exception: fail,
        },
    )
    application.router.redirect_slashes = False  # those at the end are taken off
    return application


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What tells browsers which pages' scripts may read answers; nothing where none may."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after"),
            allow_private_network=True,
        )
    ]


def make_metrics_application(frontend: Frontend) -> Starlette:
    """What answers on the metrics port."""

    application = Starlette(routes=[metrics_route(frontend, Keys(()))])
    application.router.redirect_slashes = False
    return application


class HttpServer(uvicorn.Server):
    """A server of one application on one socket, until `finish`."""

    def __init__(self, application: Starlette, listener: Listener, section: ServerSection, connections: int) -> None:
        """Answer requests.

        Args:
            application: that answers.
            listener: where from.
            section: its certificate.
            connections: that may be open at once.
        """
        self._connections = Connections(connections, _refuse_connection)
        super().__init__(
            uvicorn.Config(
                application,
                http=self._connections.protocol(),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=section.tls_cert,
                ssl_keyfile=section.tls_key,
            )
        )
        self._listener = listener

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs this server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections; uvicorn calls it."""
        opened = self._listener.socket
        if self.config.ssl is None and opened.family != socket.AF_UNIX:
            await super().startup(sockets)
            return
        await super().startup([])

        kind = self._connections.protocol()

        def protocol() -> asyncio.Protocol:
            config, state = self.config, self.lifespan.state
            return kind(config=config, server_state=self.server_state, app_state=state)

        if self.config.ssl is None:
            self.servers = [await asyncio.get_running_loop().create_unix_server(protocol, sock=opened)]
            return
        bounds = self._connections
        port = TlsPort(opened, self.config.ssl, protocol, bounds.most_handshakes, HEAD_SECONDS)
        self.servers = [cast(asyncio.Server, port)]

    async def run_here(self) -> None:
        """Answer until `finish`."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, MeasuredLoop):
            self._connections.mark = loop.stalls.mark
        sweeping = asyncio.create_task(self._connections.sweep_on())
        try:
            await self.serve(sockets=[self._listener.socket])
        finally:
            sweeping.cancel()

    def finish(self) -> None:
        """Take no more requests, and end once those in work have their answers."""
        self.should_exit = True

    def cut(self) -> None:
        """End now."""
        self.should_exit = self.force_exit = True


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request on a connection too many, and close it."""
    headers = {"retry-after": str(RETRY_SECONDS), "connection": "close"}
    message = "as many connections are open as may be (server.max_connections): come again later"
    answer = _plain_error(Request(scope), message, HTTPException(503, headers=headers))
    await answer(scope, receive, send)


def _hint(path: str, headers: Mapping[str, str], routes: Sequence[Route]) -> str:
    """What a client may have meant that asked for what there is not; empty where nothing is like it."""
    if "Allow" in headers:
        return f" (use {' or '.join(sorted(headers['Allow'].split(', ')))})"
    known = [route.path for route in routes if not route.param_convertors]
    match = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    return f" (did you mean {match[0]}?)" if match else ""


def _plain_error(request: Request, message: str, error: HTTPException) -> JSONResponse:
    if kserve.is_below(request):
        return JSONResponse({"error": message}, status_code=error.status_code, headers=error.headers)
    if anthropic.is_below(request):
        told = anthropic.error_body(message, error.status_code)
        return JSONResponse(told, status_code=error.status_code, headers=error.headers)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _count(frontend: Frontend, response: Response) -> Response:
    frontend.metrics.count_refusal(response.status_code)
    return response
