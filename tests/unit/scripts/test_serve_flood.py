"""What scripts/soak/serve_flood.py takes for a fault, against a server that answers everything alike."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.soak import serve_flood
from scripts.soak.serve_flood import Flood, is_expected
from scripts.soak.worst_requests import Worst

KIND = Worst("any", "/v1/completions", lambda model: b"{}")
OPTIONS = {"seconds": 1000, "streams": 1, "clients": 1, "seed": 1}
STREAM = b'data: {"choices": []}\n\ndata: [DONE]\n\n'


@dataclass
class Answers:
    """A server, as the flood sees it."""

    url: str
    model: str = "m"
    lines: list[str] = field(default_factory=list)

    def resident_bytes(self) -> dict[str, int]:
        return {"front": 1}


def flood(status: int, body: bytes = STREAM, is_whole: bool = True, **options: int) -> Flood:
    """Flood a server that gives this answer, or ends it too early, until something has come of it, and a little
    longer: what would come again at once does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        length = len(body) + (not is_whole)
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        writer.close()

    async def work() -> Flood:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            found = Flood(Answers(f"http://127.0.0.1:{port}"), [KIND], argparse.Namespace(**{**OPTIONS, **options}))
            flooding = asyncio.create_task(found.run())
            async with asyncio.timeout(60):
                while not (found.faults or found.num_pieces > 1 or any(map(Counter.total, found.statuses.values()))):
                    await asyncio.sleep(0.01)
            await asyncio.wait((flooding,), timeout=0.3)
            found._end = 0.0
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            return found

    return asyncio.run(work())


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_flood, "FAULT_SECONDS", 1000.0)


def test_streams_that_end_as_they_should_are_no_fault() -> None:
    found = flood(200, clients=0)
    assert found.num_pieces and not found.faults


@pytest.mark.parametrize("status", [400, 500, 503, 504])
def test_a_stream_that_is_not_let_in_is_a_fault_and_not_asked_for_again_at_once(status: int) -> None:
    assert flood(status, clients=0).faults == [f"a stream was not let in: {status}"]


@pytest.mark.parametrize(
    ("body", "is_whole", "fault"),
    [
        (STREAM[:23], True, "a stream had no end"),
        (STREAM[:23], False, "a stream was cut: RemoteProtocolError"),
        (b'data: {"error": "x"}\n\n', True, 'a stream ended: data: {"error": "x"}'),
    ],
)
def test_so_is_one_that_ends_too_early(body: bytes, is_whole: bool, fault: str) -> None:
    (found,) = flood(200, body, is_whole, clients=0).faults
    assert found.startswith(fault)


@pytest.mark.parametrize("status", [500, 503, 504])
def test_so_is_a_servers_own_error(status: int) -> None:
    assert flood(status, streams=0).faults == [f"any: {status}"]


def test_what_refuses_a_request_is_none() -> None:
    found = flood(413, streams=0)
    assert found.statuses["any"]["413"] and not found.faults


def test_codes_of_grpc_have_the_same_rule() -> None:
    assert all(map(is_expected, ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "1 ended")))
    assert not any(map(is_expected, ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")))
