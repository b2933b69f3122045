"""Connections of an HTTP port: how many there may be, and for how long a client may leave one without moving.

Requests are bounded behind their heads: by their bodies' size and time, by the door, by the time that they may take.
This bounds what comes before and behind: connections that send nothing, heads that do not end, answers that nobody
reads. It knows uvicorn's protocol over httptools. It does not know what is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 20.0
"""How long a connection may be open, or a request have begun, without the end of a request's head."""

MOST_HEAD_BYTES = 1 << 16
"""Of the head of a request that has not come to its end. (One that comes whole may be a little longer.)"""

STALLED_SECONDS = 60.0
"""How long a client may read nothing while there is more for it than its connection holds."""

SPARE = 64
"""Connections beyond the most that get an answer which says so. More than these are cut without one."""

SPARE_SECONDS = 5.0
"""How long one of these may take to send a request's head."""

_SWEEP_SECONDS = 1.0
_OTHER_FILES = 256
"""File descriptors of the front beside its connections."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Connections:
    """The open connections of a port.

    Attributes:
        most: that may be open at once.
        refuse: answers a request on a connection beyond these.
        clock: seconds; for tests.
        open: all of them.
    """

    most: int
    refuse: ASGIApp
    clock: Callable[[], float] | None = None
    open: set[BoundedProtocol] = field(default_factory=set)

    def protocol(self) -> type[BoundedProtocol]:
        """For uvicorn, which makes one for each connection."""
        return type("BoundedProtocol", (BoundedProtocol,), {"bounds": self})

    def now(self) -> float:
        """Seconds, on the clock by which connections are bounded."""
        return self.clock() if self.clock is not None else asyncio.get_running_loop().time()

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


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: Connections

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._is_spare = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._waits_since: float | None = None
        self._num_unread = 0
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio calls it."""
        if len(self.bounds.open) >= self.bounds.most + SPARE:
            self.transport = transport
            transport.abort()
            return
        self._is_spare = len(self.bounds.open) >= self.bounds.most
        self._waits_since = self.bounds.now()
        self.bounds.open.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio calls it."""
        self.bounds.open.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"The head of the request is larger than {MOST_HEAD_BYTES} bytes.")
        elif self._waits_since is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes that belong to no request, such as empty lines, and the rest of a body that was refused.
            self._waits_since = self.bounds.now()

    def on_message_begin(self) -> None:
        """As httptools calls it."""
        self._is_in_head, self._num_head_bytes = True, 0
        self._waits_since = self.bounds.now()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """As httptools calls it."""
        self._is_in_head, self._waits_since = False, None
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        refuse: Any = self.bounds.refuse
        super()._start_asgi_task(cycle, refuse if self._is_spare else app)

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
    """Raise this process's limit on open files to what so many connections need, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE + _OTHER_FILES
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
