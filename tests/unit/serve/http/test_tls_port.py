"""Connections with TLS before the end of their handshake, over real sockets: how many there are, and for how long."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from launch.serve.admission.event_loop_stalls import MeasuredLoop
from launch.serve.application import http_server
from launch.serve.application.addresses import listen
from launch.serve.application.http_server import HttpServer
from launch.serve.http import connections
from launch.serve.http import tls as tls_port
from launch.serve.http.tls import TlsPort
from trtrun.configuration.process_sections import ServerSection

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: install the package openssl")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> ServerSection:
    folder = tmp_path_factory.mktemp("tls")
    kind = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    command = ["openssl", *kind, "-subj", "/CN=test", "-keyout", "one.key", "-out", "one.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return ServerSection(tls_cert=folder / "one.pem", tls_key=folder / "one.key")


class Port:
    """A server that says by which scheme it was asked."""

    def __init__(self, section: ServerSection, most: int) -> None:
        async def scheme(request: Request) -> Response:
            return PlainTextResponse(request.url.scheme)

        self.listener = listen("127.0.0.1", 0, "server.http_port")
        self.server = HttpServer(Starlette(routes=[Route("/", scheme)]), self.listener, section, most)

    @property
    def opened(self) -> TlsPort:
        (opened,) = self.server.servers
        assert isinstance(opened, TlsPort)
        return opened

    async def connect(self) -> Stream:
        """Open a connection, and say nothing."""
        return await asyncio.open_connection("127.0.0.1", self.listener.port)

    async def ask(self) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port, ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.rpartition(b"\r\n\r\n")[2]


def with_port(section: ServerSection, most: int, check: Callable[[Port], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        port = Port(section, most)
        serving = asyncio.create_task(port.server.run_here())
        try:
            while not port.server.started:
                await asyncio.sleep(0)
            await asyncio.wait_for(check(port), 40)
        finally:
            port.server.cut()
            await asyncio.wait_for(serving, 20)

    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        runner.run(work())


def test_a_handshake_has_as_long_as_a_requests_head(section: ServerSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)

    async def check(port: Port) -> None:
        reader, writer = await port.connect()
        assert await reader.read() == b""
        writer.close()
        assert await port.ask() == b"https"
        while port.opened.num_handshakes:
            await asyncio.sleep(0)

    with_port(section, 8, check)


def test_of_too_many_handshakes_the_oldest_gives_way(section: ServerSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE", 1)

    async def check(port: Port) -> None:
        streams = []
        for count in (1, 2, 2):
            streams.append(await port.connect())
            while port.opened.num_handshakes != count or (len(streams) == 3 and not streams[0][0].at_eof()):
                await asyncio.sleep(0)
        assert await port.ask() == b"https"
        assert await streams[1][0].read() == b""
        assert not streams[2][0].at_eof()
        for _, writer in streams:
            writer.close()

    with_port(section, 2, check)


def test_what_is_no_tls_ends_alone(section: ServerSection) -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        assert await port.ask() == b"https"

    with_port(section, 8, check)


def test_a_system_that_is_full_is_asked_again(
    section: ServerSection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_port, "FULL_SECONDS", 0.01)

    class Full:
        """A socket that has no descriptor for a connection at first."""

        def __init__(self, port: TlsPort) -> None:
            self.port, self.listening = port, port._listening

        def accept(self) -> Any:
            self.port._listening = self.listening
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            return self.listening.fileno()

    async def check(port: Port) -> None:
        monkeypatch.setattr(port.opened, "_listening", Full(port.opened))
        assert await port.ask() == b"https"
        assert "no connection can be taken: [Errno 24] Too many open files" in caplog.text

    with_port(section, 8, check)


def test_a_server_that_ends_waits_for_no_handshake(section: ServerSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 1000.0)
    streams: list[Stream] = []

    async def check(port: Port) -> None:
        streams.append(await port.connect())
        while not port.opened.num_handshakes:
            await asyncio.sleep(0)

    with_port(section, 8, check)
    assert streams
