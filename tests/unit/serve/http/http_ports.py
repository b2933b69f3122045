"""An HTTP port for tests of its connections: a server over a real socket, and a clock that stands until it is moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from engine_messages import run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from launch.serve.application.addresses import listen
from launch.serve.application.http_server import HttpServer
from trtrun.configuration.process_sections import ServerSection

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Port:
    """A server that says "hello" at / and everything at /endless, and a clock that stands until it is moved."""

    def __init__(self, most: int) -> None:
        self.listener = listen("127.0.0.1", 0, "server.http_port")
        routes = [Route("/", self.hello, methods=["GET", "POST"]), Route("/endless", self.endless)]
        routes.append(Route("/length", self.length, methods=["POST"]))
        self.server = HttpServer(Starlette(routes=routes), self.listener, ServerSection(), most)
        self.bounds = self.server._connections
        self.now = 0.0
        self.bounds.clock = lambda: self.now
        self.num_endless = self.num_hellos = 0
        self.has_ended = asyncio.Event()

    async def hello(self, request: Request) -> Response:
        self.num_hellos += 1
        return PlainTextResponse("hello")

    async def length(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def endless(self, request: Request) -> Response:
        async def body() -> Any:
            try:
                while True:
                    self.num_endless += 1
                    await asyncio.sleep(0)
                    yield b"x" * 50_000
            finally:
                self.has_ended.set()

        return StreamingResponse(body())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        known = set(self.bounds.open)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        while not self.bounds.open - known:
            await asyncio.sleep(0)
        return reader, writer

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.bounds.sweep()

    async def wait_open(self, count: int) -> None:
        while len(self.bounds.open) != count:
            await asyncio.sleep(0)


def with_port(most: int, check: Callable[[Port], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        port = Port(most)
        serving = asyncio.create_task(port.server.run_here())
        try:
            await check(port)
        finally:
            port.server.cut()
            await serving

    run(work())


async def ask(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes = GET) -> tuple[bytes, bytes]:
    """Head and body of the answer to a request."""
    reader, writer = stream
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
    return head, await reader.readexactly(int(length.split()[1]))


async def keep_busy(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Have a request in work on a connection for as long as it is open."""
    stream[1].write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    await stream[0].readexactly(10)
