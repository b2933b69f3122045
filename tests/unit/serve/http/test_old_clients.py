"""HTTP/1.0 and clients that send no more behind their request, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from engine_messages import run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from launch.serve.application.addresses import Listener, listen
from launch.serve.application.http_server import HttpServer
from launch.serve.http import unix_sockets
from launch.serve.http.old_clients import CONTINUE, is_reset
from launch.serve.http.requests import unless_gone
from trtrun.configuration.process_sections import ServerSection

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """A server whose /whole and /stream answer once they may, on a port or on a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.listener = (
            listen("127.0.0.1", 0, "server.http_port") if path is None else Listener(unix_sockets.listen(path), 0)
        )
        routes = [Route("/whole", self.whole, methods=["GET", "POST"]), Route("/stream", self.stream)]
        self.server = HttpServer(Starlette(routes=routes), self.listener, ServerSection(), 8)
        self.is_asked = asyncio.Event()
        self.may_begin = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.is_given_up = asyncio.Event()

    async def whole(self, request: Request) -> Response:
        await request.body()
        self.is_asked.set()
        try:
            await unless_gone(request, self.may_answer.wait())
        except BaseException:
            self.is_given_up.set()
            raise
        return PlainTextResponse("hello")

    async def stream(self, request: Request) -> Response:
        await self.may_begin.wait()

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one "
                self.is_asked.set()
                await self.may_answer.wait()
                yield b"two "
                yield b""
                yield b"three"
            except BaseException:
                self.is_given_up.set()
                raise

        return StreamingResponse(pieces())

    async def send(self, request: bytes) -> Stream:
        if self.path is None:
            stream = await asyncio.open_connection("127.0.0.1", self.listener.port)
        else:
            stream = await asyncio.open_unix_connection(self.path)
        stream[1].write(request)
        return stream


def with_port(check: Callable[[Port], Coroutine[Any, Any, None]], path: Path | None = None) -> None:
    async def work() -> None:
        port = Port(path)
        serving = asyncio.create_task(port.server.run_here())
        try:
            await asyncio.wait_for(check(port), 60)
        finally:
            port.server.cut()
            await serving

    run(work())


@pytest.mark.parametrize(("path", "body"), [("/stream", b"one two three"), ("/whole", b"hello")])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_answers_to_http_1_0_are_not_in_chunks(path: str, body: bytes, version: bytes) -> None:
    async def check(port: Port) -> None:
        port.may_begin.set()
        port.may_answer.set()
        head = b"GET %b HTTP/%b\r\nHost: x\r\nConnection: close\r\n\r\n" % (path.encode(), version)
        reader, writer = await port.send(head)
        told, _, sent = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        is_chunked = version == b"1.1" and path == "/stream"
        assert (b"transfer-encoding: chunked" in told) is is_chunked and told.startswith(b"HTTP/1.1 200 ")
        assert (sent == body) is not is_chunked

    with_port(check)


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("path", ["/whole", "/stream"])
def test_a_client_that_sends_no_more_has_its_answer(path: str, is_file: bool, tmp_path: Path) -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.send(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        writer.write_eof()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        port.may_begin.set()
        await port.is_asked.wait()
        port.may_answer.set()
        told = await reader.read()  # and the connection ends
        writer.close()
        assert told.startswith(b"HTTP/1.1 200 ") and b"connection: close" in told
        assert told.endswith(b"hello" if path == "/whole" else b"three\r\n0\r\n\r\n") and not port.is_given_up.is_set()

    with_port(check, tmp_path / "socket" if is_file else None)


@pytest.mark.parametrize("way", ["ends", "resets", "of a file"])
@pytest.mark.parametrize("path", ["/whole", "/stream"])
def test_a_client_that_is_gone_has_given_up(path: str, way: str, tmp_path: Path) -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.send(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        if way == "of a file":  # which tells at once that nobody is there, unless it first stayed to read
            writer.write_eof()
            await reader.readexactly(len(CONTINUE))
        port.may_begin.set()
        await port.is_asked.wait()
        if way == "resets":
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await port.is_given_up.wait()
        while port.server._connections.open:
            await asyncio.sleep(0)

    with_port(check, tmp_path / "socket" if way == "of a file" else None)


def test_who_still_reads_from_a_file_is_there() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.shutdown(socket.SHUT_WR)
        assert not is_reset(here)


def test_half_a_request_is_none() -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.send(b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        writer.write_eof()
        assert await reader.read() == b"" and not port.is_asked.is_set()
        writer.close()

    with_port(check)
