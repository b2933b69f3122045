"""The door at which the server that follows knocks: who is there, proved by a token that never crosses the network.

    the server before │ nonce
    the one that follows │ nonce, sealed greeting
    the server before │ sealed answer

Behind that both sides send messages of engines (`engine.messages`). With `server.tls_cert` all of it is encrypted, by
the certificate that the door's file tells; else texts cross the network as those between ranks do. Seals are of
`parallel.watchdog.message_socket`. It does not know what the messages do.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from launch.serve.handover.name_file import DoorAddress
from parallel.watchdog.handshake import listen, own_loopback
from parallel.watchdog.message_socket import is_nonce, make_nonce, make_seals
from trtrun.configuration.process_sections import ServerSection

KNOCK_SECONDS = 20.0
"""For a connection, and for each line of who connects."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that is gone is noticed within half a minute."""

MOST_ASKED = 16
"""Connections of which it is not known yet who they are; those beyond are closed."""

_NO_LINE = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""What comes in place of a line."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What the server that follows says of itself.

    Attributes:
        url: that clients go on at.
        texts: as of `hash_texts`.
        job: number of its Slurm job; None outside one.
    """

    url: str
    texts: str
    job: str | None = None

    def __str__(self) -> str:
        return self.url if self.job is None else f"job {self.job} at {self.url}"


class Door:
    """A port for the server that follows.

    Attributes:
        address: of it, once it is open.
    """

    def __init__(self, section: ServerSection, admit: Callable[[Greeting, Streams], Awaitable[None]]) -> None:
        """It is closed.

        Args:
            section: its certificate, which has been checked.
            admit: called with a connection of one that knows the token.
        """
        self._section, self._admit = section, admit
        self._server: asyncio.Server | None = None
        self._num_asked = 0
        self.address = DoorAddress(hosts=(), port=0, token=secrets.token_hex(32))

    async def open(self, hosts: tuple[str, ...], listens_to_all: bool) -> None:
        """Listen.

        Args:
            hosts: names of this host.
            listens_to_all: whether other hosts reach the port, too.

        Raises:
            OSError: no port is free.
        """
        listening = listen(listens_to_all)
        context = certificate = None
        if self._section.tls_cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._section.tls_cert, self._section.tls_key)
            certificate = _fingerprint(
                ssl.PEM_cert_to_DER_cert(_first(self._section.tls_cert.read_text(encoding="latin-1")))
            )
        self._server = await asyncio.start_server(self._hear, sock=listening, ssl=context)
        port = listening.getsockname()[1]
        self.address = msgspec.structs.replace(self.address, hosts=hosts, port=port, certificate=certificate)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end."""
        greeting = None
        try:
            if self._num_asked < MOST_ASKED:
                self._num_asked += 1
                with suppress(OSError, ValueError, *_NO_LINE):
                    greeting = await self._ask(reader, writer)
                self._num_asked -= 1
            if greeting is not None:
                keep_alive(writer)
                await self._admit(greeting, (reader, writer))
        finally:
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Greeting:
        """The greeting of one that knows the token; raises ValueError for another."""
        own = make_nonce()
        writer.write(own + b"\n")
        theirs = await _read_line(reader)
        if not is_nonce(theirs):
            raise ValueError("no nonce")
        outward, inward = make_seals(self.address.token, own, theirs)
        greeting = msgspec.json.decode(inward.open(await _read_line(reader)), type=Greeting)
        writer.write(outward.close(b'{"welcome": true}') + b"\n")
        return greeting


async def knock(door: DoorAddress, greeting: Greeting) -> Streams:
    """Connect to the server before.

    Raises:
        OSError: it is not reached, or is not the one that knows the token.
    """
    hosts = [*door.hosts, *([own_loopback()] if socket.gethostname() in door.hosts else [])]
    failure = OSError("its file names no host")
    for host in hosts:
        try:
            async with asyncio.timeout(KNOCK_SECONDS):
                context = None if door.certificate is None else _any_certificate()
                streams = await asyncio.open_connection(host, door.port, ssl=context)
                try:
                    _check_certificate(door, streams[1])
                    await _prove(door.token, greeting, *streams)
                except BaseException:
                    streams[1].close()
                    raise
            keep_alive(streams[1])
            return streams
        except (OSError, ValueError, *_NO_LINE) as error:
            failure = OSError(f"{host}: {error or 'it does not answer'}")
    raise failure


def _any_certificate() -> ssl.SSLContext:
    """What takes any certificate: who has it is told by the door's file, and by no authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _check_certificate(door: DoorAddress, writer: asyncio.StreamWriter) -> None:
    if door.certificate is not None:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if found is None or _fingerprint(found) != door.certificate:
            raise ValueError("it has another certificate than its file says")


def _first(text: str) -> str:
    """The first certificate of a file in PEM, which is the server's own."""
    begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return text[begin : end + len(ssl.PEM_FOOTER)]


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


async def _prove(token: str, greeting: Greeting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    theirs = await _read_line(reader)
    if not is_nonce(theirs):
        raise ValueError("it is no server of trtrun")
    own = make_nonce()
    inward, outward = make_seals(token, theirs, own)
    writer.write(own + b"\n" + outward.close(msgspec.json.encode(greeting)) + b"\n")
    inward.open(await _read_line(reader))


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(KNOCK_SECONDS):
        return (await reader.readuntil(b"\n"))[:-1]


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice when the other host is gone."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
