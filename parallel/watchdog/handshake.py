"""How rank 0 and a worker prove to each other that they know the job's token.

    rank 0 → worker    a nonce
    worker → rank 0    a nonce of its own, and its first message
    rank 0 → worker    its first message

Messages are sealed, by which each side knows the other (see seals.py). A side that has not proved who it is can make
the other compare a line of a few bytes with what it should be, and no more. It does not know what messages say.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from parallel.errors import HeartbeatError
from parallel.watchdog.message_socket import MessageSocket, wait_for
from parallel.watchdog.seals import is_nonce, make_nonce, make_seals

CONNECT_SECONDS = 3.0
"""Until rank 0's first word. A system whose queue is full lets a connection look open that it has thrown away."""

ANSWER_SECONDS = 20.0
"""Most time of a handshake, on either side; and how long a worker comes again that did not get in."""

MOST_TRIES = 20
"""How often it does. Where strangers crowd rank 0's port, some find no place, or lose it to those behind them."""


class NotHeardError(HeartbeatError):
    """The other side has closed the connection, or said nothing at all: it has no place, or is no rank 0."""


_CROWDED = (NotHeardError, TimeoutError, ConnectionResetError)


class Challenge:
    """Rank 0's question to one that has connected, and the check of the answer."""

    def __init__(self, token: str, messages: MessageSocket) -> None:
        """Ask.

        Args:
            token: of the job.
            messages: the connection.
        """
        self._token = token
        self._messages = messages
        self._nonce = make_nonce()
        messages.send_line(self._nonce)

    def read_answer(self, line: bytes) -> dict[str, Any]:
        """The first message of one that knows the token; the connection is sealed from here on.

        Raises:
            ValueError: it does not know the token.
        """
        nonce, _, sealed = line.partition(b" ")
        if not is_nonce(nonce):
            raise ValueError("it speaks another language")
        own, theirs = make_seals(self._token, self._nonce, nonce)
        self._messages.seal(outward=own, inward=theirs)
        return self._messages.open(sealed)


def connect(addresses: Sequence[str], port: int, token: str, introduction: dict[str, Any]) -> MessageSocket:
    """Connect to the first address that answers with a proof of the token; both sides have proved it on return.

    Raises:
        HeartbeatError: none does; the message has the reason for each.
    """
    reasons: dict[str, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    for _ in range(MOST_TRIES):
        crowded = []
        for address in addresses:
            try:
                return _connect_to(address, port, token, introduction)
            except (OSError, HeartbeatError) as error:
                reasons[address] = f"{address} port {port}: {error}"
                crowded += [address] if isinstance(error, _CROWDED) else []
        addresses = crowded
        if not crowded or time.monotonic() > deadline:
            break
    raise HeartbeatError("; ".join(reasons.values()) or "it has no address")


def _connect_to(address: str, port: int, token: str, introduction: dict[str, Any]) -> MessageSocket:
    opened = MessageSocket(socket.create_connection((address, port), timeout=CONNECT_SECONDS))
    try:
        server_nonce, nonce = _next_line(opened, CONNECT_SECONDS), make_nonce()
        if not is_nonce(server_nonce):
            raise HeartbeatError("another program answers there")
        theirs, own = make_seals(token, server_nonce, nonce)
        opened.seal(outward=own, inward=theirs)
        opened.send_line(nonce + b" " + opened.close_up(introduction))
        try:
            opened.open(_next_line(opened, ANSWER_SECONDS))
        except ValueError:
            raise HeartbeatError("another program answers there") from None
    except BaseException:
        opened.close()
        raise
    return opened


def _next_line(opened: MessageSocket, seconds: float) -> bytes:
    """The next line of a handshake, in which each side sends one and waits for the other's."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        wait_for([opened], left)
        opened.flush()
        if (line := opened.receive_line()) is not None:
            return line
        if opened.fault:
            raise HeartbeatError("another program answers there")
        if opened.is_closed:
            raise NotHeardError("the connection was closed at once")
    raise NotHeardError(f"no answer within {seconds:g} s")
