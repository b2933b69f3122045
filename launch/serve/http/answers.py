"""Answers that are long or last, for every protocol: whole ones, made and sent in parts as their client reads, and
streams of events, written as they come, where it is asked for with comments while nothing does.

The HTML standard has the format of events (https://html.spec.whatwg.org/multipage/server-sent-events.html). It does not
know what answers hold, or how clients that read nothing are cut (`connections`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launch.serve.admission.event_loop_stalls import YieldTimer

JOINED_BYTES = 1 << 16
"""The most bytes of an answer that is sent as one: more than most have."""

PING = b": ping\n\n"
"""A comment, which breaks a silence and says nothing."""


class _PartsResponse(Response):
    """An answer of several parts, whose length is told before."""

    def __init__(
        self,
        parts: Sequence[bytes | memoryview],
        media_type: str,
        headers: Mapping[str, str] | None,
        let_go: Callable[[], None] | None,
    ) -> None:
        super().__init__(
            media_type=media_type, headers={**(headers or {}), "content-length": str(sum(map(len, parts)))}
        )
        self._parts = parts
        self._let_go = let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; ASGI's interface."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            yield_timer = YieldTimer()
            for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await yield_timer.yield_if_due()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._let_go is not None:
                self._let_go()


async def make_parts(parts: Iterable[bytes]) -> list[bytes]:
    """Parts that are made as they are asked for, each in little time."""
    made: list[bytes] = []
    yield_timer = YieldTimer()
    for part in parts:
        made.append(part)
        await yield_timer.yield_if_due()
    return made


def answer_in_parts(
    parts: Sequence[bytes | memoryview],
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    let_go: Callable[[], None] | None = None,
) -> Response:
    """The answer of parts, as one where they are short.

    Args:
        parts: of its body.
        media_type, headers: of it.
        let_go: called once it is sent, or will not be; at once where it is short.
    """
    if sum(map(len, parts)) <= JOINED_BYTES:
        if let_go is not None:
            let_go()
        return Response(b"".join(parts), media_type=media_type, headers=dict(headers or {}))
    return _PartsResponse(parts, media_type, headers, let_go)


class LastEvents(bytes):
    """The last events of a stream, which are sent together with its end."""


class EventStream(Response):
    """A stream of events that lets its request go, whether it was read to its end, given up, or never begun."""

    media_type = "text/event-stream"

    def __init__(
        self,
        close: Callable[[], None],
        events: AsyncGenerator[bytes, None],
        ping_seconds: float | None = None,
        ping: bytes = PING,
    ) -> None:
        """Answer with events.

        Args:
            close: gives up what has not ended of the request; called at the end, whatever that is.
            events: from `event`; several of them at once where there are.
            ping_seconds: after so long without an event a ping is sent, for proxies that end connections on which
                nothing moves; None for never.
            ping: what is sent then.
        """
        self._ping_seconds = ping_seconds
        self._ping = ping
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._close = close
        self._events = events
        self._is_gone = False
        self._sending = asyncio.Lock()
        self._last_sent = 0.0  # by the event loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; ASGI's interface."""
        streaming = asyncio.current_task()
        assert streaming is not None
        watching = asyncio.create_task(self._watch(receive, streaming))
        try:
            async with aclosing(self._events):
                await self._stream(send)
                watching.cancel()  # to servers a client whose answer is whole is gone
                # Streams that end together have their ends before the first of them is counted and put away.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not self._is_gone or streaming.uncancel():
                raise  # somebody else's
        finally:
            watching.cancel()
            self._end_pings()
            self._close()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._ping_seconds is not None:
            self._last_sent = asyncio.get_running_loop().time()
            self._wait_for_silence(send, self._ping_seconds)
        async for body in self._events:
            if isinstance(body, LastEvents):
                self._end_pings()
                await self._send(send, body, more_body=False)
                return
            await self._send(send, body)
        self._end_pings()
        await self._send(send, b"", more_body=False)

    async def _send(self, send: Send, body: bytes, more_body: bool = True) -> None:
        """Send one part behind the other: where a client reads slowly the server takes them in one at a time alone."""
        async with self._sending:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
        if self._ping_seconds is not None:
            self._last_sent = asyncio.get_running_loop().time()

    async def _watch(self, receive: Receive, streaming: asyncio.Task[object]) -> None:
        """End the stream when the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        streaming.cancel()

    def _wait_for_silence(self, send: Send, ping_seconds: float) -> None:
        """Look again once the silence since what was sent last is long enough. No timer is moved for an event."""
        loop, since = asyncio.get_running_loop(), self._last_sent
        if self._sending.locked():
            since = loop.time()  # what is being sent will be there later still
        self._timer = loop.call_at(since + ping_seconds, self._look, send, ping_seconds, since)

    def _look(self, send: Send, ping_seconds: float, since: float) -> None:
        """Break a silence, unless something was sent meanwhile or is about to be."""
        if self._last_sent <= since and not self._sending.locked():
            self._last_sent = asyncio.get_running_loop().time()
            self._pinging = asyncio.create_task(self._send(send, self._ping))
        self._wait_for_silence(send, ping_seconds)

    def _end_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()


def event(data: bytes | str) -> bytes:
    """An event with one line of data."""
    return b"data: %b\n\n" % (data.encode() if isinstance(data, str) else data)
