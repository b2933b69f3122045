"""Connections of an HTTP port: how many there may be, and for how long a client may leave one without moving.

Requests are bounded behind their heads: by their bodies' size and time, by admission, by the time that they may take.
This bounds what comes before and behind: connections that send nothing, heads that do not end, answers that nobody
reads.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from launch.serve.admission.event_loop_stalls import MOST_SECONDS
from launch.serve.http.old_clients import HalfClosed, may_be_half_closed, without_chunks

HEAD_SECONDS = 20.0
"""How long a connection may be open, or a request have begun, without the end of a request's head."""

MOST_HEAD_BYTES = 1 << 16
"""The most bytes of the head of a request that has not come to its end. (One that comes whole may be a little
longer.)"""

MOST_FRAMING_BYTES = 1 << 16
"""The most bytes of a body, beside its content and as much again for each of its bytes: lengths of chunks and what may
stand by them, and what follows the last one."""

FRAMING_A_BYTE = 8
"""Such bytes for each of the content: chunks of one byte take six."""

STALLED_SECONDS = 60.0
"""How long a client may read nothing while there is more for it than its connection holds."""

SPARE = 64
"""Connections beyond the most that get an answer which says so. More than these are cut without one."""

SPARE_SECONDS = 5.0
"""How long one of these may take to send a request's head."""

MOST_HEADERS = 256
"""Fields of a request's head, each of which is looked at several times."""

FED_BYTES = 1 << 12
"""Bytes that are parsed before the next look at the clock."""

_SWEEP_SECONDS = 1.0
_OTHER_FILES = 256
"""File descriptors of the frontend beside its connections."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Connections:
    """The open connections of a port.

    Attributes:
        most: that may be open at once.
        refuse: answers a request on a connection beyond these.
        clock: seconds; for tests.
        open: all of them.
        idle: those without a request, and those whose request's head has not come to its end; the oldest first.
        mark: called where the event loop begins with a connection; see `stalls`.
    """

    most: int
    refuse: ASGIApp
    clock: Callable[[], float] | None = None
    open: set[BoundedProtocol] = field(default_factory=set)
    idle: dict[BoundedProtocol, None] = field(default_factory=dict)
    mark: Callable[[], object] = lambda: None

    def protocol(self) -> type[BoundedProtocol]:
        """The protocol's class, of which uvicorn makes one for each connection."""
        return type("BoundedProtocol", (BoundedProtocol,), {"bounds": self})

    def now(self) -> float:
        """Seconds, on the clock by which connections are bounded."""
        return self.clock() if self.clock is not None else asyncio.get_running_loop().time()

    def make_room(self) -> None:
        """End the connection that has gone longest without a request, if no more may be open."""
        if len(self.open) >= self.most and self.idle:
            oldest = next(iter(self.idle))
            self.leave(oldest)
            oldest.transport.abort()

    def most_handshakes(self) -> int:
        """How many connections may be before the end of their handshake, beside those that are open: where few are,
        most of the others, so that somebody who opens many keeps nobody out."""
        return max(SPARE, self.most - len(self.open))

    def leave(self, protocol: BoundedProtocol) -> None:
        """Stop counting a connection that is closed."""
        self.open.discard(protocol)
        self.idle.pop(protocol, None)

    async def sweep_on(self) -> None:
        """Look at all of them again and again, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """End the connections that do not move."""
        now = self.now()
        for protocol in list(self.open):
            try:
                protocol.end_if_stuck(now)
            except Exception:
                logger.exception("a connection could not be looked at")


class _Flow(FlowControl):
    """uvicorn's word on whether more may be read; what is read already goes first."""

    def __init__(self, transport: asyncio.Transport, feed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._feed = feed

    @override
    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._feed()


class BoundedProtocol(HttpToolsProtocol):
    """A connection within bounds."""

    bounds: Connections

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._is_spare = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._waits_since: float | None = None
        self._num_unread = 0
        self._unparsed = bytearray()
        self._is_held = False
        self._is_feeding = False
        self._num_headers = 0
        self._unread_since = 0.0
        self._num_body_bytes = 0
        self._num_framing_bytes = 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.bounds.make_room()
        if len(self.bounds.open) >= self.bounds.most + SPARE:
            self.transport = transport
            transport.abort()
            return
        self._is_spare = len(self.bounds.open) >= self.bounds.most
        self._waits_since = self.bounds.now()
        self.bounds.open.add(self)
        self.bounds.idle[self] = None
        super().connection_made(transport)
        self.flow = _Flow(transport, self._feed_soon)

    def _feed_soon(self) -> None:
        """More may be read, but what has come goes first."""
        self._is_held = True
        if not self._is_feeding:
            self._is_feeding = True
            self.loop.call_soon(self._feed)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self.bounds.leave(self)
        self._unparsed.clear()
        super().connection_lost(error)

    @override
    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not self._is_feeding:
            self._feed()

    def _feed(self) -> None:
        """Have what has come parsed, a little at a time: in what comes at once there may be thousands of requests, or
        of parts of one. Others have their turn in between, and requests behind one that is answered wait."""
        self._is_feeding = False
        self.bounds.mark()
        began = time.perf_counter()
        while self._unparsed and not self.transport.is_closing():
            if self.flow.read_paused or self.pipeline:
                self._hold()
                return
            if time.perf_counter() - began > MOST_SECONDS:
                self._hold()
                self._feed_soon()
                return
            data = bytes(self._unparsed[:FED_BYTES])
            del self._unparsed[:FED_BYTES]
            self._parse(data)
        self._unparsed.clear()
        if self._is_held and not self.flow.read_paused and not self.transport.is_closing():
            self._is_held = False
            self.transport.resume_reading()

    def _hold(self) -> None:
        """Let nothing more come until this is parsed."""
        if not self._is_held:
            self._is_held = True
            self.transport.pause_reading()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:  # no other waits behind it
            self.bounds.idle[self] = None
        if self._unparsed and not self.pipeline:
            self._feed_soon()

    def _parse(self, data: bytes) -> None:
        self._num_framing_bytes += len(data)  # less what turns out to be content
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"The head of the request is larger than {MOST_HEAD_BYTES} bytes.")
        elif self._num_framing_bytes > MOST_FRAMING_BYTES + FRAMING_A_BYTE * self._num_body_bytes:
            self.transport.abort()
        elif self._waits_since is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes that belong to no request, such as empty lines, and the rest of a body that was refused.
            self._waits_since = self.bounds.now()

    @override
    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes, self._num_headers = True, 0, 0
        self._num_body_bytes = self._num_framing_bytes = 0
        self._waits_since = self.bounds.now()
        super().on_message_begin()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers <= MOST_HEADERS:
            super().on_header(name, value)
        elif self._num_headers == MOST_HEADERS + 1:
            self.send_400_response(f"The head of the request has more than {MOST_HEADERS} fields.")

    @override
    def on_headers_complete(self) -> None:
        self._is_in_head, self._waits_since = False, None
        if self.transport.is_closing():  # it was refused already, and is no request
            return
        self.bounds.idle.pop(self, None)
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_framing_bytes -= len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Warn of nothing: the request is answered as it stands, and the log has no two lines for each."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        answer: Any = self.bounds.refuse if self._is_spare else app
        if cycle.scope["http_version"] == "1.0":
            answer = without_chunks(answer, cycle)
        super()._start_asgi_task(cycle, answer)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Return true to keep the connection for what has to be sent."""
        if self.pipeline or not may_be_half_closed(self.transport, self.cycle):
            return None
        HalfClosed(self.transport, self.cycle)
        return True

    def resume_writing(self) -> None:
        """Note that the client has read most of what there was for it. (As much may lie there again
        at the next look.)"""
        self._unread_since = self.bounds.now()
        super().resume_writing()

    def end_if_stuck(self, now: float) -> None:
        """Close it where the client has had its time."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread != self._num_unread:
            self._num_unread, self._unread_since = num_unread, now
        elif num_unread and now - self._unread_since > STALLED_SECONDS:
            logger.info("a client has read nothing for %g s, and is left", STALLED_SECONDS)
            self.transport.abort()
        patience = SPARE_SECONDS if self._is_spare else HEAD_SECONDS
        if self._waits_since is not None and now - self._waits_since > patience and not self.transport.is_closing():
            if self._is_in_head:
                self.send_400_response(f"The head of the request was not there within {patience:g} s.")
            else:
                self.transport.close()


def allow_open_files(num_connections: int) -> None:
    """Raise this process's limit on open files to what so many connections need, as far as the system lets it.

    The same number may be open over gRPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * (num_connections + SPARE) + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "server.max_connections is %d, and the system lets this process open %d files: raise ulimit -n to %d",
            num_connections, allowed, wanted,
        )  # fmt: skip
