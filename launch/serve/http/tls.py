"""TLS: the server's certificate and key, and the connections of a port before they are any.

The files are looked at before anything listens, so that what is wrong with them is one line. Event loops tell a
protocol of a connection once its handshake is over, so what `connections` bounds does not hold before. `TlsPort`
accepts the sockets itself, so that these have their own bound, and the oldest gives way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError, one_line, wrap_errors

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
"""OpenSSL's reasons for a key that does not fit the certificate."""


class _EncryptedError(Exception):
    """OpenSSL asks for a passphrase."""


def check_tls(section: ServerSection) -> None:
    """Raise ConfigError for files that make no TLS."""
    cert, key = section.tls_cert, section.tls_key
    if cert is None or key is None:
        return
    _check_file("server.tls_cert", cert, _CERTIFICATE, "certificate")
    _check_file("server.tls_key", key, _KEY, "private key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _refuse_to_ask)
    except _EncryptedError:
        raise ConfigError(
            f"server.tls_key {key} is encrypted, and nobody is there to type its passphrase: store it without one "
            f"(openssl pkey -in {key} -out NEW_FILE)"
        ) from None
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise ConfigError(f"server.tls_key {key} is not the key of server.tls_cert {cert}") from None
        raise ConfigError(
            f"server.tls_cert {cert}, server.tls_key {key}: OpenSSL cannot read them: {one_line(error)}"
        ) from None


def _check_file(name: str, path: Path, mark: bytes, content: str) -> None:
    with wrap_errors(f"{name} {path}", ConfigError):
        is_there = mark in path.read_bytes()
    if not is_there:
        raise ConfigError(f"{name} {path} holds no {content} in PEM")


def _refuse_to_ask() -> str:
    raise _EncryptedError


MOST_ACCEPTED = 64
"""Sockets that are taken at a stretch, before others in the event loop have their turn."""

FULL_SECONDS = 1.0
"""Seconds after which sockets are taken again, where the system had no room for one."""

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
        """The number of handshakes that are going on."""
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
