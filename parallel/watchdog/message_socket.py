"""One JSON object a line over TCP, between processes that prove to each other that they know the same token.

The token itself never crosses the network: each side answers the other's random challenge with a keyed hash of it
(RFC 2104). What is read is bounded in size and never more than JSON. It does not know what the objects mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.errors import HeartbeatError

MOST_BYTES = 1 << 20
"""Of one line, and of what may wait to be sent."""

FEW_BYTES = 1 << 12
"""Of one line of a peer that has proved nothing yet."""

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 20.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's IPv4 address


class MessageSocket:
    """A connected TCP socket, never blocking; used by one thread.

    Attributes:
        is_closed: the peer has gone, or sent what is no line of JSON.
        most_bytes: of one line of the peer.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        connection.setblocking(False)
        self.most_bytes = most_bytes
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self.is_closed = False

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message and send what goes without waiting. A peer that takes nothing for long loses messages."""
        if self.is_closed or len(self._unsent) > MOST_BYTES:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    def receive(self) -> list[dict[str, Any]]:
        """All whole messages that are there; also those that came before the peer went."""
        messages: list[dict[str, Any]] = []
        try:
            while data := self._socket.recv(65536):
                self._received += data
                messages += self._take_lines()
            self.is_closed = True
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.is_closed = True
        return messages

    def finish(self, seconds: float) -> None:
        """Send what waits and close, once the peer has read it, or after `seconds`.

        A socket that is closed while something in it is unread takes along what it has just sent.
        """
        deadline = time.monotonic() + seconds
        with suppress(OSError):
            self.flush()
            self._socket.shutdown(socket.SHUT_WR)
        while not self.is_closed and (left := deadline - time.monotonic()) > 0:
            wait_for([self], left)
            self.receive()
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self.is_closed = True
        self._socket.close()

    def _take_lines(self) -> list[dict[str, Any]]:
        *lines, rest = self._received.split(b"\n")
        if max(map(len, (*lines, rest))) > self.most_bytes:
            raise ValueError("a line too long")
        self._received = rest
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that is no object")
        return messages


def wait_for(ends: Sequence[MessageSocket | socket.socket], seconds: float) -> set[int]:
    """Wait until one of the ends can be read; returns the file numbers of those that can. Of any number: select takes
    none above 1023, which a process with many files open has."""
    poll = select.poll()
    for end in ends:
        poll.register(end.fileno(), select.POLLIN)
    return {number for number, _ in poll.poll(max(0, math.ceil(seconds * 1000)))}


class Challenge:
    """One side's question to the other, and the check of the answer."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.nonce = secrets.token_hex(16)

    def accepts(self, proof: object, role: str) -> bool:
        """Whether the peer, in its role, knows the token."""
        return isinstance(proof, str) and hmac.compare_digest(
            proof.encode(), prove(self._token, role, self.nonce).encode()
        )


def prove(token: str, role: str, nonce: object) -> str:
    """The answer to a challenge; `role` keeps an answer from being sent back to where it came from."""
    return hmac.new(token.encode(), f"{role} {nonce}".encode(), hashlib.sha256).hexdigest()


def connect(addresses: Sequence[str], port: int, token: str, introduction: dict[str, Any]) -> MessageSocket:
    """Connect to the first address that answers with a proof of the token; both sides have proved it on return.

    Raises:
        HeartbeatError: none does; the message has the reason for each.
    """
    reasons = []
    for address in addresses:
        try:
            return _connect_to(address, port, token, introduction)
        except (OSError, HeartbeatError) as error:
            reasons.append(f"{address} port {port}: {error}")
    raise HeartbeatError("; ".join(reasons) or "it has no address")


def _connect_to(address: str, port: int, token: str, introduction: dict[str, Any]) -> MessageSocket:
    opened = MessageSocket(socket.create_connection((address, port), timeout=CONNECT_SECONDS))
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        nonce = _next_message(opened, deadline).get("nonce")
        challenge = Challenge(token)
        opened.send({**introduction, "proof": prove(token, "client", nonce), "nonce": challenge.nonce})
        if not challenge.accepts(_next_message(opened, deadline).get("proof"), "server"):
            raise HeartbeatError("another program answers there")
    except BaseException:
        opened.close()
        raise
    return opened


def _next_message(opened: MessageSocket, deadline: float) -> dict[str, Any]:
    """The next message of a handshake, in which each side sends one line and waits for the other's."""
    while (left := deadline - time.monotonic()) > 0:
        wait_for([opened], left)
        opened.flush()
        if messages := opened.receive():
            return messages[0]
        if opened.is_closed:
            raise HeartbeatError("the connection was closed at once")
    raise HeartbeatError(f"no answer within {ANSWER_SECONDS:g} s")


def listen(everywhere: bool) -> socket.socket:
    """A listening socket on a free port: of this host alone, or of all its interfaces."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def own_addresses() -> list[str]:
    """This host's addresses that other hosts may reach: of its interfaces, without the loopback ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                record = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(record[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return [address for address in found if not address.startswith("127.")]
