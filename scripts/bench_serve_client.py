#!/usr/bin/env python3
"""Clients of a server for scripts/bench_serve.py: streams that are read with as little work as can be.

    python scripts/bench_serve_client.py HOST PORT MODEL STREAMS < orders > answers

One process, one event loop, a connection a stream, which is kept from one order to the next. An order is a line of
JSON:

    {"prompts": ["…"], "max_tokens": 128, "requests": 1}

Each connection takes its prompt and asks for it `requests` times, one after the other, greedy and streaming. The answer
is a line of JSON: when it began and ended (`time.perf_counter`, one clock for all processes of a host), seconds to the
first token of every request, tokens, chunks, and the CPU seconds of this process: what a client takes is not the
server's. Nothing is parsed while it is timed: an answer ends with its last chunk, and events are counted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection. Requests go over it one after the other."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received: list[bytes] = []
        self._tail = b""
        self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter()
        self._received.append(data)
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio calls it."""
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server has closed the connection ({error})"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request and wait for the end of its answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._received, self._tail, self.first = [], b"", 0.0
        self._transport.write(request)
        await self._done
        return b"".join(self._received)


def make_request(host: str, model: str, prompt: str, max_tokens: int) -> bytes:
    """The bytes of a request."""
    values: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    values |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(values).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_answer(answer: bytes) -> tuple[int, int]:
    """Tokens and chunks with text of a whole answer."""
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    last = json.loads(events[-1]) if events else {}
    if "usage" not in last:
        sys.exit(f"bench_serve_client.py: the server answered {answer[-500:].decode(errors='replace')}")
    return last["usage"]["completion_tokens"], len(events) - 1


async def follow_orders(host: str, port: int, model: str, num_streams: int) -> None:
    """Open the connections, and do what stdin says until it ends."""
    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(Stream, host, port))[1] for _ in range(num_streams)]
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        answers: list[bytes] = []
        firsts: list[float] = []

        async def work(stream: Stream, prompt: str, order: dict[str, Any], answers: Any, firsts: Any) -> None:
            request = make_request(host, model, prompt, order["max_tokens"])
            for _ in range(order["requests"]):
                began = time.perf_counter()
                answers.append(await stream.ask(request))
                firsts.append(stream.first - began)

        used, began = time.process_time(), time.perf_counter()
        pairs = zip(streams, order["prompts"], strict=True)
        await asyncio.gather(*(work(stream, prompt, order, answers, firsts) for stream, prompt in pairs))
        ended, cpu = time.perf_counter(), time.process_time() - used
        read = [read_answer(answer) for answer in answers]
        told = {"began": began, "ended": ended, "firsts": firsts, "cpu_s": cpu}
        print(json.dumps(told | {"tokens": sum(item[0] for item in read), "chunks": sum(item[1] for item in read)}))
        sys.stdout.flush()


if __name__ == "__main__":
    HOST, PORT, MODEL, STREAMS = sys.argv[1:]
    asyncio.run(follow_orders(HOST, int(PORT), MODEL, int(STREAMS)))
