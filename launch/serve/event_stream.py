"""Server-sent events as an ASGI answer: each a line of data, written when it comes, and comments while nothing does.

The WHATWG's HTML standard, section 9.2, has the format. It knows ASGI and when a client is gone. It does not know what
the events say, or how slow clients are cut off (`connections`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING_SECONDS = 15.0
"""After so long without an event a comment is sent, for proxies that end connections on which nothing moves."""


class EventStream(Response):
    """A stream of events. Whatever happens to it, `on_end` is called at its end."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_gone: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """Answer with events.

        Args:
            events: whole ones, with the empty line behind each (`event`); several at a time where there are.
            on_gone: called when the client is gone: the events should end soon.
            on_end: called once no more events will be asked for.
        """
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._on_gone = on_gone
        self._on_end = on_end
        self._is_idle = True
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._wait_for_silence(loop, send)
            async for body in self._events:
                self._is_idle = False
                await send({"type": "http.response.body", "body": body, "more_body": True})
            self._end_pings()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end_pings()
            watching.cancel()
            self._on_end()
            await self._events.aclose()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._on_gone()

    def _wait_for_silence(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        self._timer = loop.call_later(PING_SECONDS, self._ping, loop, send)

    def _ping(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        if self._is_idle and (self._pinging is None or self._pinging.done()):
            self._pinging = loop.create_task(_send_ping(send))
        self._is_idle = True
        self._wait_for_silence(loop, send)

    def _end_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()


def event(data: bytes) -> bytes:
    """An event with one line of data."""
    return b"data: " + data + b"\n\n"


async def _send_ping(send: Send) -> None:
    await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
