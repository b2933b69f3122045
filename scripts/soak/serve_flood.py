#!/usr/bin/env python3
"""Floods a `trtrun serve` with the worst request of each kind, beside streams that behave well, and looks what these
feel.

    python scripts/soak/serve_flood.py [--seconds 120] [--clients 64] [--streams 8] [--alone] [--only WORD]

The shipped pair is served in one process on the CPU. Each client sends one kind of request after the other, as they are
in `worst_requests.py`: megabytes of JSON and tensors, words and biases as many as may be, answers with all log
probabilities, bytes that no library sends; some go away before their answer. With --alone each kind is sent once by
itself before, and what it took is told. Printed are the longest wait for a token in a stream that had begun, the
longest processor time that the front's event loop worked at a stretch, the memory of all parts, and how many engines
were lost. The last line is JSON. Exit status 1 where an engine was lost, a stretch was longer than 50 ms, a stream was
not let in for another reason than that as many are in work as may be, or ended with an error or none, or a request had
an answer that is none of the 2xx and 4xx kinds, over gRPC another code than what these are there, or nobody to send it
to. A server may end a connection whose request it has refused: that is counted by its name, and no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.harness.server import Server, open_client, write_config, write_tokenizer
from scripts.harness.trials import Trial, make_parser, play_trial
from scripts.soak.worst_requests import Worst, worst_requests

PATIENCE = 600.0
LONGEST_STRETCH = 0.05
"""Seconds, as docs/serve.md promises."""

STRETCH = "trtrun:front_longest_stretch_seconds"
RESTARTS = "trtrun:engine_restarts_total"
CODES = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
"""Of gRPC, that a request may have for an answer."""

FAULT_SECONDS = 1.0
"""Until the next request of a client that had a fault."""

_CALL = "/inference.GRPCInferenceService/ModelInfer"


class Flood(Trial):
    """Clients of both kinds, and what they saw.

    Attributes:
        statuses: answers by kind and status.
        longest_gap: seconds between two pieces of a stream.
        most_bytes: memory of each part, at most.
    """

    def __init__(self, server: Server, kinds: list[Worst], options: argparse.Namespace) -> None:
        super().__init__()
        self._server = server
        self._kinds = kinds
        self._options = options
        self._end = 0.0
        self.statuses: dict[str, Counter[str]] = {}
        self.longest_gap = 0.0
        self.num_pieces = 0
        self.num_refused_streams = 0
        self.most_bytes: dict[str, int] = {}

    async def try_alone(self) -> None:
        """Each kind once, and what it took."""
        async with open_client(self._server.url, PATIENCE) as client:
            for kind in self._kinds:
                num_lines, began = len(self._server.lines), time.monotonic()
                status = await self._try(client, kind, PATIENCE)
                seconds, longest = time.monotonic() - began, (await self._server.metrics())[STRETCH]
                print(f"{kind.name}: {status} after {seconds:.2f} s, longest stretch {longest:.3f} s", flush=True)
                for line in self._server.lines[num_lines:]:
                    if "at a stretch" in line:
                        print(f"    {line}", flush=True)

    async def run(self) -> None:
        """All of them, for their time."""
        self._end = time.monotonic() + self._options.seconds
        looking = asyncio.create_task(self._look())
        try:
            async with asyncio.TaskGroup() as clients:
                for number in range(self._options.streams):
                    clients.create_task(self._read_streams(number))
                for number in range(self._options.clients):
                    clients.create_task(self._flood(random.Random(self._options.seed * 1000 + number)))
        finally:
            looking.cancel()

    async def _read_streams(self, number: int) -> None:
        """One stream behind the other."""
        body = {
            "model": self._server.model, "prompt": f"def f{number}(", "max_tokens": 1500, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        async with open_client(self._server.url, PATIENCE) as client:
            while time.monotonic() < self._end:
                try:
                    fault = await self._read_stream(client, body)
                except (httpx.TransportError, OSError) as error:
                    fault = f"a stream was cut: {type(error).__name__}: {error}"
                if fault:
                    await self._stop_at_fault(fault)

    async def _read_stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """Read a stream to its end, or as long as there is time; returns what must not be."""
        last = None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                self.num_refused_streams += 1
                await asyncio.sleep(1.0)
                return ""
            if answer.status_code != 200:
                return f"a stream was not let in: {answer.status_code}"
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    return f"a stream ended: {line[:300]}"
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.num_pieces += 1
                    self.longest_gap = max(self.longest_gap, now - (last or now))
                    last = now
                if time.monotonic() > self._end or line == "data: [DONE]":
                    return ""
        return "a stream had no end"

    async def _flood(self, choose: random.Random) -> None:
        async with open_client(self._server.url, PATIENCE) as client:
            while time.monotonic() < self._end:
                kind, patience = choose.choice(self._kinds), choose.choice((0.3, 3.0, PATIENCE))
                left = max(0.1, self._end - time.monotonic())
                await self._try(client, kind, min(patience, left))

    async def _try(self, client: httpx.AsyncClient, kind: Worst, patience: float) -> str:
        """Send a request, and count what came of it; returns that."""
        try:
            status = await asyncio.wait_for(self._send(client, kind), patience)
            is_fault = not is_expected(status)
        except TimeoutError:
            status, is_fault = "left", False
        except (httpx.TransportError, OSError) as error:
            status, is_fault = type(error).__name__, isinstance(error, (httpx.ConnectError, ConnectionRefusedError))
        self.statuses.setdefault(kind.name, Counter())[status] += 1
        if is_fault:
            await self._stop_at_fault(f"{kind.name}: {status}")
        return status

    async def _send(self, client: httpx.AsyncClient, kind: Worst) -> str:
        """Send a request and read its answer to the end; returns its status."""
        body = kind.body(self._server.model)
        if kind.is_raw:
            return await self._send_bytes(body)
        if kind.is_grpc:
            return await self._call(body)
        headers = {"content-type": "application/json", **kind.headers}
        async with client.stream("POST", kind.path, content=body, headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                pass
            return str(answer.status_code)

    async def _send_bytes(self, data: bytes) -> str:
        address = urlsplit(self._server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(data)
            reading = asyncio.create_task(_count(reader))
            with suppress(ConnectionError):
                await writer.drain()
                writer.write_eof()
            done, _ = await asyncio.wait((reading,), timeout=2.0)
            reading.cancel()
            return f"{len(done)} ended"
        finally:
            writer.close()

    async def _call(self, raw: bytes) -> str:
        options = (("grpc.max_receive_message_length", -1),)
        async with grpc.aio.insecure_channel(self._server.grpc_address, options=options) as channel:
            try:
                await channel.unary_unary(_CALL)(raw)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

    async def _look(self) -> None:
        """At the memory of all parts."""
        while True:
            for part, size in (await asyncio.to_thread(self._server.resident_bytes)).items():
                self.most_bytes[part] = max(size, self.most_bytes.get(part, 0))
            await asyncio.sleep(1.0)

    async def _stop_at_fault(self, fault: str) -> None:
        self.tell_fault(fault)
        await asyncio.sleep(FAULT_SECONDS)


def is_expected(status: str) -> bool:
    """Whether the server may answer so: it was able to, or the request was wrong or too much."""
    return status in CODES or status.endswith(" ended") or status[:1] in ("2", "4")


async def _count(reader: asyncio.StreamReader) -> int:
    count = 0
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            count += len(data)
    return count


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole trial; returns its figures."""
    scheduler, queue = {"max_batch_size": 16}, 512
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    config = write_config(
        folder / "serve.yaml", 1, tokenizer=tokenizer, scheduler=scheduler, server={"max_queue": queue}
    )
    kinds = [kind for kind in worst_requests(256) if options.only in kind.name]
    server = Server(config, folder, ("-v",))
    await server.start(PATIENCE)
    flood = Flood(server, kinds, options)
    try:
        if options.alone:
            await flood.try_alone()
        if options.seconds:
            await flood.run()
        metrics = await server.metrics()
    finally:
        status = await server.end(PATIENCE)
    if metrics[STRETCH] > LONGEST_STRETCH:
        flood.faults.append(f"the event loop worked {metrics[STRETCH]:.3f} s at a stretch")
        flood.faults += [line for line in server.lines if "at a stretch, in or behind" in line][:20]
    if metrics[RESTARTS] or status not in (0, 3):
        flood.faults.append(f"{metrics[RESTARTS]:.0f} engines were lost; exit status {status}")
    flood.faults += server.error_lines()[:20]
    for name, counted in sorted(flood.statuses.items()):
        print(f"{name}: {dict(counted)}")
    return {
        "seconds": options.seconds,
        "clients": options.clients,
        "streams": options.streams,
        "requests": sum(map(Counter.total, flood.statuses.values())),
        "pieces": flood.num_pieces,
        "streams_refused": flood.num_refused_streams,
        "longest_gap_s": round(flood.longest_gap, 3),
        "longest_stretch_s": round(metrics[STRETCH], 4),
        "engine_losses": int(metrics[RESTARTS]),
        "most_mib": {part: round(size / 2**20, 1) for part, size in sorted(flood.most_bytes.items())},
        "faults": flood.faults,
    }


def main() -> int:
    """Try it, and tell."""
    parser = make_parser(__doc__, clients=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the flood; 0 for none")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--alone", action="store_true", help="send each kind by itself before")
    parser.add_argument("--only", default="", help="kinds whose names have this in them")
    return play_trial(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
