"""Connections of an HTTP port, over real sockets: how many there are, and how long a client may leave one as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from engine_messages import run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from launch.serve import connections
from launch.serve.connections import HEAD_SECONDS, MOST_HEAD_BYTES, SPARE_SECONDS, STALLED_SECONDS
from launch.serve.http_server import HttpServer, listen
from trtrun.errors import ConfigError
from trtrun.server_config import ServerSection

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Port:
    """A server that says "hello" at / and everything at /endless, and a clock that stands until it is moved."""

    def __init__(self, most: int) -> None:
        self.listener = listen("127.0.0.1", 0, "server.http_port")
        routes = [Route("/", self.hello, methods=["GET", "POST"]), Route("/endless", self.endless)]
        self.server = HttpServer(Starlette(routes=routes), self.listener, ServerSection(), most)
        self.bounds = self.server._connections
        self.now = 0.0
        self.bounds.clock = lambda: self.now
        self.num_endless = 0
        self.has_ended = asyncio.Event()

    async def hello(self, request: Request) -> Response:
        return PlainTextResponse("hello")

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
        known = len(self.bounds.open)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        while len(self.bounds.open) == known:
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


def test_a_connection_too_many_is_told_so_and_the_others_go_on() -> None:
    async def check(port: Port) -> None:
        streams = [await port.connect() for _ in range(3)]
        head, body = await ask(streams[2])
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in head and b"connection: close" in head
        assert "server.max_connections" in json.loads(body)["error"]["message"]
        assert await streams[2][0].read() == b""
        for stream in streams[:2] * 2:  # twice on the same connection
            assert (await ask(stream))[1] == b"hello"
        streams[0][1].close()
        await port.wait_open(1)
        assert (await ask(await port.connect()))[1] == b"hello"

    with_port(2, check)


def test_far_too_many_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: Port) -> None:
        monkeypatch.setattr(connections, "SPARE", 1)
        streams = [await port.connect() for _ in range(2)]
        reader, _ = await asyncio.open_connection("127.0.0.1", port.listener.port)
        assert await reader.read() == b""
        assert len(port.bounds.open) == 2 and (await ask(streams[0]))[1] == b"hello"
        # One that was let in to be told so has less time.
        port.pass_time(SPARE_SECONDS + 1)
        assert await streams[1][0].read() == b""
        assert (await ask(streams[0]))[1] == b"hello"

    with_port(1, check)


def test_heads_have_a_time() -> None:
    async def check(port: Port) -> None:
        silent, slow, between = [await port.connect() for _ in range(3)]
        assert (await ask(between))[1] == b"hello"
        slow[1].write(GET[:-4])
        between[1].write(b"\r\n")  # belongs to no request
        protocols = [protocol for protocol in port.bounds.open]
        while not any(protocol._is_in_head for protocol in protocols):
            await asyncio.sleep(0)
        while any(protocol._waits_since is None for protocol in protocols):
            await asyncio.sleep(0)
        port.pass_time(HEAD_SECONDS)
        assert len(port.bounds.open) == 3
        port.pass_time(1)
        assert b"HTTP/1.1 400 " in await slow[0].read()
        assert await silent[0].read() == b"" and await between[0].read() == b""
        await port.wait_open(0)

    with_port(8, check)


def test_heads_and_bodies_that_come_in_pieces_are_taken() -> None:
    async def check(port: Port) -> None:
        stream = await port.connect()
        for _ in range(2):
            for place in range(len(GET) - 1):
                stream[1].write(GET[place : place + 1])
                await asyncio.sleep(0)
            assert (await ask(stream, GET[-1:]))[1] == b"hello"
        # A request that is being answered has no head to wait for.
        stream[1].write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await stream[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        port.pass_time(HEAD_SECONDS + 1)
        assert await stream[0].readexactly(1000)

    with_port(8, check)


def test_heads_have_a_size() -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(GET[:-2])
        for _ in range(MOST_HEAD_BYTES // 1000 + 20):
            writer.write(b"a: " + b"b" * 995 + b"\r\n")
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        answer = b""
        with suppress(ConnectionError):  # what it has sent since may cut the answer off
            answer = await reader.read()
        assert not answer or b"larger than 65536 bytes" in answer
        await port.wait_open(0)

    with_port(8, check)


def test_a_client_that_reads_nothing_is_left_and_one_that_reads_is_not() -> None:
    async def check(port: Port) -> None:
        stalled, reading = await port.connect(), await port.connect()
        for stream in (stalled, reading):
            stream[1].write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")

        async def wait_full() -> None:
            """Until neither connection takes more."""
            before = -1
            while before != port.num_endless or not all(p.transport.get_write_buffer_size() for p in port.bounds.open):
                before = port.num_endless
                for _ in range(100):
                    await asyncio.sleep(0)

        await wait_full()
        port.pass_time(1)
        await reading[0].readexactly(20_000_000)
        await wait_full()
        for _ in range(2):
            assert len(port.bounds.open) == 2
            port.pass_time(STALLED_SECONDS)
            await reading[0].readexactly(20_000_000)
            await wait_full()
        await port.wait_open(1)
        await asyncio.wait_for(port.has_ended.wait(), 60)
        await reading[0].readexactly(1000)

    with_port(8, check)


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, limits: given.append(limits))
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (1024, 4096))
    connections.allow_open_files(100)
    assert given == [] and not caplog.records
    connections.allow_open_files(2000)
    assert given == [(2320, 4096)] and not caplog.records
    connections.allow_open_files(10000)
    assert given[-1] == (4096, 4096) and "raise ulimit -n to 10320" in caplog.text


@pytest.mark.parametrize("host", ["x..y", "a" * 70])
def test_what_is_no_name_of_a_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server.host: '.*' is no name of a host"):
        listen(host, 0, "server.http_port")
