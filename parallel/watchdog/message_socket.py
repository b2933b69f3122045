"""Lines over TCP that never block, and sealed messages in them: one JSON object a line behind its seal.

    seal of 64 hexadecimal digits │ space │ {"doing": …} │ line feed

A seal is a keyed hash (RFC 2104) of a message's number and text. Each connection has a key for either direction, made
of the token and of a nonce of each side. So a message that somebody between the two has written, changed, repeated,
left out, moved, turned around or taken from another connection does not bear the seal that its place calls for. Texts
are not secret; token and keys never cross the network.

What bears no right seal is not parsed: its connection ends. A connection is read once a turn and bounded in what it
keeps, so that no peer keeps a thread from the others. It does not know what the objects mean.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_HASH = "sha256"
_NONCE = re.compile(rb"[0-9a-f]{32}")
_NUMBER_BYTES = 8


class Seal:
    """One direction of one connection; both of its ends have one, and count along."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, text: bytes) -> bytes:
        """The next message of this direction: its seal before its text."""
        return self._next_seal(text) + b" " + text

    def open(self, message: bytes) -> bytes:
        """The text of the next message of this direction.

        Raises:
            ValueError: this is not it. The connection is of no use then.
        """
        given, _, text = message.partition(b" ")
        if not hmac.compare_digest(given, self._next_seal(text)):
            raise ValueError("a message without the seal that it should bear")
        return text

    def _next_seal(self, text: bytes) -> bytes:
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        self._number += 1
        return hmac.digest(self._key, number + text, _HASH).hex().encode()


def make_nonce() -> bytes:
    """A side's part of a connection's keys, never the same twice."""
    return secrets.token_hex(16).encode()


def is_nonce(word: bytes) -> bool:
    """Whether a word has the form of a nonce."""
    return _NONCE.fullmatch(word) is not None


def make_seals(token: str, server_nonce: bytes, client_nonce: bytes) -> tuple[Seal, Seal]:
    """The seals of one connection: of what the server sends, and of what the client does."""

    def make(direction: bytes) -> Seal:
        return Seal(hmac.digest(token.encode(), b" ".join((direction, server_nonce, client_nonce)), _HASH))

    return make(b"server"), make(b"client")


MOST_BYTES = 1 << 20
"""Most bytes of one line, and of what may wait to be sent."""

FEW_BYTES = 1 << 12
"""Most bytes of one line of a peer that has proved nothing yet."""

_READ_BYTES = 1 << 16


class MessageSocket:
    """A connected TCP socket, never blocking; used by one thread.

    Attributes:
        is_closed: the peer has gone, or sent what it should not have sent.
        fault: what that was; empty where the peer has gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection, over which lines go until `seal`."""
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._most_bytes = FEW_BYTES
        self._received = bytearray()
        self._lines: deque[bytes] = deque()
        self._unsent = bytearray()
        self._outward: Seal | None = None
        self._inward: Seal | None = None
        self._cannot_send = False
        self.is_closed = False
        self.fault = ""

    def fileno(self) -> int:
        """The file descriptor, for select."""
        return self._socket.fileno()

    def seal(self, outward: Seal, inward: Seal) -> None:
        """Seal all from here on. The first message of the peer that is will be its proof of who it is."""
        self._outward, self._inward = outward, inward

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message and send what goes without waiting. A peer that takes nothing for long loses messages."""
        if not self.is_closed and len(self._unsent) <= MOST_BYTES:
            self.send_line(self.close_up(message))

    def close_up(self, message: dict[str, Any]) -> bytes:
        """The line of a message, sealed as the next one that is sent."""
        assert self._outward is not None
        return self._outward.close(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Queue a line as it is, and send what goes without waiting."""
        self._unsent += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting."""
        if self.is_closed or self._cannot_send:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._cannot_send = True  # what came before the peer went is there to be read

    def receive(self) -> list[dict[str, Any]]:
        """The messages that one read brings; what is left in the socket is for the next turn.

        What the peer said before it went comes first: only then is the connection closed.
        """
        self._read()
        messages: list[dict[str, Any]] = []
        try:
            while self._lines:
                messages.append(self.open(self._lines.popleft()))
        except ValueError as error:
            self.refuse(str(error))
        return messages

    def receive_line(self) -> bytes | None:
        """The next line as it is, of what is there or of one read; None where none is whole."""
        if not self._lines:
            self._read()
        return self._lines.popleft() if self._lines else None

    def open(self, line: bytes) -> dict[str, Any]:
        """The message of a line.

        Raises:
            ValueError: it does not bear the peer's seal, or is no object.
        """
        assert self._inward is not None
        text = self._inward.open(line)
        self._most_bytes = MOST_BYTES
        return read_object(text)

    def refuse(self, fault: str) -> None:
        """Hear no more of the peer, which has sent what it should not have sent."""
        self.fault, self.is_closed = fault, True
        self._lines.clear()

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

    def _read(self) -> None:
        """Read once, of a peer that has proved nothing no more than it may say."""
        try:
            data = self._socket.recv(min(_READ_BYTES, self._most_bytes + 1))
        except BlockingIOError:
            self.is_closed = self.is_closed or self._cannot_send
            return
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return
        self._received += data
        *lines, rest = self._received.split(b"\n")
        if max(map(len, (*lines, rest))) > self._most_bytes:
            self.refuse(f"a line longer than {self._most_bytes} bytes")
            return
        self._received = rest
        self._lines += map(bytes, lines)


def read_object(text: bytes) -> dict[str, Any]:
    """The JSON object of a text whose writer is known.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("a message that is no object")
    return value


def wait_for(ends: Sequence[MessageSocket | socket.socket], seconds: float) -> set[int]:
    """Wait until one of the ends can be read; returns the file numbers of those that can. Of any number: select takes
    none above 1023, which a process with many files open has."""
    poll = select.poll()
    for end in ends:
        poll.register(end.fileno(), select.POLLIN)
    return {number for number, _ in poll.poll(max(0, math.ceil(seconds * 1000)))}
