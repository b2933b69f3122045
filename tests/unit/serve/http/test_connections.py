"""Connections of an HTTP port, over real sockets: how many there are, and how long a client may leave one as it is."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress

import pytest
from http_ports import GET, Port, ask, keep_busy, with_port

from launch.serve.application.addresses import listen
from launch.serve.http import connections
from launch.serve.http.connections import (
    HEAD_SECONDS,
    MOST_FRAMING_BYTES,
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    SPARE_SECONDS,
    STALLED_SECONDS,
)
from trtrun.errors import ConfigError


def test_a_connection_too_many_is_told_so_and_the_others_go_on() -> None:
    async def check(port: Port) -> None:
        busy = [await port.connect() for _ in range(2)]
        for stream in busy:
            await keep_busy(stream)
        last = await port.connect()
        head, body = await ask(last)
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in head and b"connection: close" in head
        assert "server.max_connections" in json.loads(body)["error"]["message"]
        assert await last[0].read() == b""
        for stream in busy:
            await stream[0].readexactly(10_000_000)
        busy[0][1].transport.abort()
        await port.wait_open(1)
        assert (await ask(await port.connect()))[1] == b"hello"

    with_port(2, check)


def test_connections_without_a_request_make_room_the_oldest_first() -> None:
    """However many strangers hold connections, whoever has a request gets it answered."""

    async def check(port: Port) -> None:
        silent, slow, asked, busy = [await port.connect() for _ in range(4)]
        slow[1].write(GET[:-4])
        await keep_busy(busy)
        assert (await ask(asked))[1] == b"hello"  # from here on it has no request, and is the last to go
        new = []
        for first in (silent, slow, asked):
            new.append(await port.connect())
            assert (await ask(new[-1]))[1] == b"hello"
            assert await first[0].read() == b""
        await busy[0].readexactly(1_000_000)
        assert len(port.bounds.open) == 4

    with_port(4, check)


def test_far_too_many_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: Port) -> None:
        monkeypatch.setattr(connections, "SPARE", 1)
        busy, told = await port.connect(), None
        await keep_busy(busy)
        told = await port.connect()
        told[1].write(GET[:-4])
        await port.wait_open(2)
        assert (await ask(told, GET[-4:]))[0].startswith(b"HTTP/1.1 503 ")
        assert await told[0].read() == b""
        # Nobody who only waits takes more than a short while of the places to be told so in.
        told = await port.connect()
        port.pass_time(SPARE_SECONDS + 1)
        assert await told[0].read() == b""
        await busy[0].readexactly(1_000_000)

    with_port(1, check)


CHUNKED = b"POST /length HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 1000),
        (CHUNKED + b"2;", b"a=b;" * 1000),
        (CHUNKED, b"1;" + b"x" * 100 + b"\r\na\r\n"),
    ],
    ids=["fields behind the body", "words beside a length", "long lengths of short chunks"],
)
def test_what_stands_beside_a_body_has_a_size(begin: bytes, more: bytes) -> None:
    async def check(port: Port) -> None:
        _, writer = await port.connect()
        writer.write(begin)
        sent = 0
        with suppress(ConnectionError):
            while sent < 100 * MOST_FRAMING_BYTES and len(port.bounds.open):
                writer.write(more)
                sent += len(more)
                await writer.drain()
                await asyncio.sleep(0)
        await port.wait_open(0)
        assert sent < 100 * MOST_FRAMING_BYTES
        writer.close()

    with_port(8, check)


def test_chunks_of_one_byte_are_taken() -> None:
    async def check(port: Port) -> None:
        stream = await port.connect()
        for _ in range(2):
            stream[1].write(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\na: b\r\n\r\n")
            assert (await ask(stream, b""))[1] == b"100000"
        stream[1].write(CHUNKED + b"186a0\r\n" + b"x" * 100_000 + b"\r\n0\r\n\r\n" + GET)
        assert (await ask(stream, b""))[1] == b"100000"
        assert (await ask(stream, b""))[1] == b"hello"

    with_port(8, check)


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
        num_looks = 0
        while len(port.bounds.open) == 2:  # the system may still take a little for the one that reads nothing
            port.pass_time(STALLED_SECONDS)
            num_looks += 1
            await reading[0].readexactly(20_000_000)
            await wait_full()
        assert num_looks >= 2
        await asyncio.wait_for(port.has_ended.wait(), 60)
        await reading[0].readexactly(1000)

    with_port(8, check)


def test_a_client_that_reads_as_much_as_comes_is_not_left() -> None:
    """However much lies there for it when it is looked at: as much as before, too."""

    async def check(port: Port) -> None:
        reading = await port.connect()
        (protocol,) = port.bounds.open
        reading[1].write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(3):
            await reading[0].readexactly(20_000_000)
            while not protocol.transport.get_write_buffer_size():
                await asyncio.sleep(0)
            protocol._num_unread = protocol.transport.get_write_buffer_size()
            port.pass_time(STALLED_SECONDS)
            assert not protocol.transport.is_closing()

    with_port(8, check)


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, limits: given.append(limits))
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (1024, 4096))
    connections.allow_open_files(100)
    assert given == [] and not caplog.records
    connections.allow_open_files(1000)
    assert given == [(2384, 4096)] and not caplog.records
    connections.allow_open_files(10000)
    assert given[-1] == (4096, 4096) and "raise ulimit -n to 20384" in caplog.text


@pytest.mark.parametrize("host", ["x..y", "a" * 70])
def test_what_is_no_name_of_a_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server.host: '.*' is no name of a host"):
        listen(host, 0, "server.http_port")


def test_thousands_of_requests_that_come_at_once_are_parsed_a_little_at_a_time_and_all_answered() -> None:
    async def check(port: Port) -> None:
        count, turns, most = 3000, 0, 0
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()

        async def take_turns() -> None:
            nonlocal turns, most
            while not is_over.is_set():
                turns += 1
                most = max([most, *(len(found.pipeline) for found in port.bounds.open)])
                await asyncio.sleep(0)

        reader, writer = await port.connect()
        turning = loop.create_task(take_turns())
        writer.write(GET * count)
        for _ in range(count):
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
        is_over.set()
        await turning
        assert turns >= count and most <= connections.FED_BYTES // len(GET) + 1
        writer.close()

    with_port(8, check)


def test_a_body_of_many_small_chunks_is_parsed_as_it_is() -> None:
    async def check(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000)
        writer.write(b"0\r\n\r\n" + GET)
        for _ in range(2):
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
        writer.close()

    with_port(8, check)


def test_heads_have_so_many_fields_and_what_is_refused_for_them_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    async def check(port: Port) -> None:
        few, many = await port.connect(), await port.connect()
        post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
        for (reader, writer), count, status in ((few, MOST_HEADERS - 2, b" 200 "), (many, MOST_HEADERS, b" 400 ")):
            writer.write(post + b"a:\r\n" * count + b"\r\nxx")
            assert status in await reader.readuntil(b"\r\n\r\n")
        assert await many[0].read() == b"The head of the request has more than 256 fields."
        await port.wait_open(1)
        assert port.server.server_state.total_requests == port.num_hellos == 1
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        few[1].close()

    with_port(8, check)
