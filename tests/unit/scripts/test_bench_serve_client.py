"""The clients of scripts/bench/bench_serve.py: when their next burst begins, and connections that were lost."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.bench_serve_client import LAST_CHUNK, Clients

TURNS = {"quick": 1, "slow": 200}
"""Turns of the event loop that the answer to each prompt takes."""


@dataclass
class FakeServer:
    """Answers each request with three tokens in two events.

    Attributes:
        closes: connections, behind every answer.
        refuses: every request.
        num_connections: so far.
        log: prompts, as their answers begin and end.
    """

    closes: bool = False
    refuses: bool = False
    num_connections: int = 0
    log: list[tuple[str, str]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, as asyncio calls it."""
        self.num_connections += 1
        while head := await _read_head(reader):
            asked: dict[str, Any] = json.loads(await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2])))
            self.log.append((asked["prompt"], "begins"))
            for _ in range(TURNS[asked["prompt"]]):
                await asyncio.sleep(0)
            self.log.append((asked["prompt"], "ends"))
            events = [{"choices": []}, {"choices": []}, {"usage": {"completion_tokens": 3}}]
            if self.refuses:
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 12\r\n\r\nno tokenizer")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            writer.write(b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + LAST_CHUNK)
            if self.closes:
                break
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def _follow(server: FakeServer, order: dict[str, int], times: int = 1) -> list[dict[str, Any]]:
    """What clients tell of an order that they get several times."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    clients = Clients("127.0.0.1", listening.sockets[0].getsockname()[1], "model", len(TURNS))
    told = []
    for _ in range(times):
        told.append(await clients.follow({"prompts": list(TURNS), "max_tokens": 3, **order}))
        while server.closes and not all(stream is not None and stream.is_lost for stream in clients.streams):
            await asyncio.sleep(0)
    listening.close()
    return told


@pytest.mark.parametrize("closes", [False, True], ids=["kept", "closed by the server"])
def test_connections_that_the_server_has_closed_are_opened_again(closes: bool) -> None:
    server = FakeServer(closes)
    for told in asyncio.run(_follow(server, {"bursts": 1, "requests": 1}, times=2)):
        assert (told["tokens"], told["chunks"], len(told["firsts"])) == (6, 4, 2)
    assert server.num_connections == (4 if closes else 2)


def test_a_refusal_is_told_at_once() -> None:
    """As of a model without a tokenizer; and not when the server closes the connection at last."""
    with pytest.raises(ConnectionError, match=r"^the server answered no tokenizer$"):
        asyncio.run(_follow(FakeServer(refuses=True), {"bursts": 1, "requests": 1}))


def test_a_burst_begins_when_the_slowest_stream_of_the_last_one_is_done() -> None:
    server = FakeServer()
    (told,) = asyncio.run(_follow(server, {"bursts": 2, "requests": 2}))
    assert (told["tokens"], len(told["firsts"])) == (24, 8)
    assert server.log.index(("slow", "ends")) > 2, "the quick stream does not wait within a burst"
    first, second = server.log[:8], server.log[8:]
    assert sorted(first) == sorted(second)
