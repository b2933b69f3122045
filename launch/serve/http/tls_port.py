"""Connections of a port with TLS before they are any: from a socket that is opened to the end of its handshake.

Event loops tell a protocol of a connection once its handshake is over, so what `connections` bounds does not hold
before. This accepts the sockets itself, so that these have their own bound, and the oldest gives way. It does not know
what comes behind a handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

MOST_ACCEPTED = 64
"""Sockets that are taken at a stretch, before others in the event loop have their turn."""

FULL_SECONDS = 1.0
"""After which sockets are taken again, where the system had no room for one."""

logger = logging.getLogger(__name__)


class TlsPort:
    """Accepts the connections of one socket; in the place of asyncio's own server."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        most: Callable[[], int],
        seconds: float,
    ) -> None:
        """Begin, in a running event loop.

        Args:
            listening: does not block.
            context: the server's certificate.
            protocol: makes one for a connection.
            most: how many handshakes there may be at once, by now. Beyond that the oldest is ended.
            seconds: that each may take.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._context = context
        self._protocol = protocol
        self._most = most
        self._seconds = seconds
        self._shaking: dict[asyncio.Task[None], None] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening, self._accept)

    @property
    def num_handshakes(self) -> int:
        """That there are."""
        return len(self._shaking)

    def close(self) -> None:
        """Take no more connections, and end those that are not through."""
        self._loop.remove_reader(self._listening)
        if self._resuming is not None:
            self._resuming.cancel()
        for shaking in self._shaking:
            shaking.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of those."""
        await asyncio.gather(*self._shaking, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("no connection can be taken: %s", error)
                self._loop.remove_reader(self._listening)
                self._resuming = self._loop.call_later(
                    FULL_SECONDS, self._loop.add_reader, self._listening, self._accept
                )
                return
            connection.setblocking(False)
            while self._shaking and len(self._shaking) >= self._most():
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                oldest.cancel()
            shaking = self._loop.create_task(self._shake(connection))
            self._shaking[shaking] = None
            shaking.add_done_callback(lambda done: self._shaking.pop(done, None))

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
        except OSError as error:  # also of TLS, and of time
            logger.debug("a handshake has failed: %s", error)
            connection.close()
