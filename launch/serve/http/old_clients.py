"""What old and simple HTTP clients do that uvicorn has no answer for: HTTP/1.0, and no more sending behind a request.

HTTP/1.0 knows no chunks: an answer whose length is not known ends with its connection (RFC 9112, 6.1). A client that
ends its sending once its request is out, as `nc -N` does, may still read; on the wire it looks like one that has gone.
"""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_SECONDS = 0.01
LATER_LOOKS_SECONDS = 1.0

_CLOSED = 7
"""TCP's state of a connection that the other side has reset; the first byte of Linux's tcp_info."""


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap an application so that answers of unknown length end with the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # So that uvicorn finds it right, once it has waited for a slow client: parts come one behind the other.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer


class HalfClosed:
    """A client that sends no more, before the head of its answer: there for its answer, or gone.

    A side that is gone resets the connection when something comes. So it is sent what every client of HTTP/1.1 passes
    over (RFC 9110, 15.2), and the connection is looked at until the answer is whole.
    """

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self._seconds = FIRST_LOOK_SECONDS
        cycle.keep_alive = False
        transport.write(CONTINUE)
        self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._look)

    def _look(self) -> None:
        if self._transport.is_closing() or self._cycle.response_complete:
            return
        if is_reset(self._transport.get_extra_info("socket")):
            self._transport.abort()
            return
        self._seconds = min(2 * self._seconds, LATER_LOOKS_SECONDS)
        self._wait()


def may_be_half_closed(transport: asyncio.Transport, cycle: RequestResponseCycle | None) -> bool:
    """Whether a client that sends no more may wait for its answer, and can be asked."""
    if cycle is None or cycle.more_body or cycle.response_started or cycle.scope["http_version"] == "1.0":
        return False
    return transport.get_extra_info("sslcontext") is None  # TLS ends in both directions at once


def is_reset(connected: Any) -> bool:
    """Whether the other side of a socket is gone, and does not only send no more."""
    if connected.family == socket.AF_UNIX:
        asking = select.poll()
        asking.register(connected.fileno(), 0)
        return any(found & select.POLLHUP for _, found in asking.poll(0))
    with suppress(OSError):
        return bool(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED)
    return True
