#!/usr/bin/env python3
"""Clients of a server for scripts/bench/bench_serve.py: streams that are read with as little work as can be.

    python scripts/bench/bench_serve_client.py HOST PORT MODEL STREAMS < orders > answers

One process, one event loop, a connection a stream, which is kept from one order to the next; those that the server has
closed meanwhile are opened again. An order is a line of JSON:

    {"prompts": ["…"], "max_tokens": 128, "bursts": 8, "requests": 1}

In a burst each connection takes its prompt and asks for it `requests` times, one after the other, greedy and streaming.
The next burst begins at once when the slowest connection has its last answer. The answer to the order is a line of
JSON: seconds from the first burst's beginning to the last one's end, seconds to the first token of every request,
tokens, chunks, and the CPU seconds of this process: what a client takes is not the server's. Nothing is parsed while it
is timed: an answer ends with its last chunk, and events are counted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

LAST_CHUNK = b"\r\n0\r\n\r\n"
NO_MORE_HEADERS = "\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection. Requests go over it one after the other.

    Attributes:
        is_lost: whether the server has closed it.
        first: `time.perf_counter` when the first token of the last request came; 0 before that.
    """

    def __init__(self) -> None:
        self.is_lost = False
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
        if len(self._received) == 1 and not data.startswith(b"HTTP/1.1 200 ") and not self._done.done():
            words = data.decode(errors="replace")
            said = words.partition(NO_MORE_HEADERS)[2] or words
            self._done.set_exception(ConnectionError(f"the server answered {said}"))

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio calls it."""
        self.is_lost = True
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server has closed the connection ({error})"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request and wait for the end of its answer.

        Raises:
            ConnectionError: the connection is lost, or gets lost meanwhile, or the server refuses.
        """
        if self.is_lost:
            raise ConnectionError("the server has closed the connection")
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


class Clients:
    """What orders are followed with.

    Attributes:
        streams: their connections; None for those that were never opened.
    """

    def __init__(self, host: str, port: int, model: str, num_streams: int) -> None:
        self._host = host
        self._port = port
        self._model = model
        self.streams: list[Stream | None] = [None] * num_streams

    async def follow(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order says; returns the answer to it."""
        requests = [make_request(self._host, self._model, prompt, order["max_tokens"]) for prompt in order["prompts"]]
        answers: list[bytes] = []
        firsts: list[float] = []

        async def work(stream: Stream, request: bytes) -> None:
            for _ in range(order["requests"]):
                began = time.perf_counter()
                answers.append(await stream.ask(request))
                firsts.append(stream.first - began)

        await self._open()
        used, began = time.process_time(), time.perf_counter()
        for _ in range(order["bursts"]):
            # A stream may have waited for the slowest one for longer than the server keeps connections.
            pairs = zip(await self._open(), requests, strict=True)
            await asyncio.gather(*(work(stream, request) for stream, request in pairs))
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        read = [read_answer(answer) for answer in answers]
        told = {"seconds": seconds, "firsts": firsts, "cpu_s": cpu}
        return told | {"tokens": sum(item[0] for item in read), "chunks": sum(item[1] for item in read)}

    async def _open(self) -> list[Stream]:
        """The connections, opened where they are not, or not any more."""
        loop = asyncio.get_running_loop()
        opened = [
            (await loop.create_connection(Stream, self._host, self._port))[1]
            if stream is None or stream.is_lost
            else stream
            for stream in self.streams
        ]
        self.streams = [*opened]
        return opened


async def follow_orders(clients: Clients) -> None:
    """Do what stdin says until it ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await clients.follow(json.loads(line))), flush=True)


if __name__ == "__main__":
    HOST, PORT, MODEL, STREAMS = sys.argv[1:]
    asyncio.run(follow_orders(Clients(HOST, int(PORT), MODEL, int(STREAMS))))
