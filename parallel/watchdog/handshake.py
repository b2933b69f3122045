"""How rank 0 and a worker find each other and prove that they know the job's token.

    rank 0 → worker    a nonce
    worker → rank 0    a nonce of its own, and its first message
    rank 0 → worker    its first message

Messages are sealed (message_socket.py), by which each side knows the other. A side that has not proved who it is can
make the other compare a line of a few bytes with what it should be, and no more.

Rank 0 listens at a port of its host alone or of all its interfaces. Whatever a stranger sends there, and however fast,
costs its own connection: it has a few bytes and seconds for one line, which is compared and not parsed; there are few
places, and those of one address crowd out each other; and the port closes once every worker is in. One thread uses it.
It does not know what messages say.
"""

from __future__ import annotations

import fcntl
import logging
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallel.errors import HeartbeatError
from parallel.watchdog.message_socket import MessageSocket, is_nonce, make_nonce, make_seals, wait_for

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


_BACKLOG = 1024
_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's IPv4 address


def listen(everywhere: bool) -> socket.socket:
    """A listening socket on a free port: of this host alone, or of all its interfaces."""
    if not everywhere:
        address = own_loopback()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def own_loopback() -> str:
    """The address at which this host reaches itself: where it has IPv6 alone, that one's."""
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


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


logger = logging.getLogger(__name__)

FEWEST_PLACES = 64
"""Places for connections that have not proved who they are; as many as workers, where those are more. One that comes
beyond that takes the place of the oldest of the address that holds the most: a worker proves itself at once."""

MOST_LINES = 10
"""Strangers that get a line in the log; the others are counted."""

PAUSE_SECONDS = 1.0
"""How long nobody is let in where the system has no file, or no memory, for a connection."""


@dataclass(eq=False)
class _Stranger:
    """One connection that has proved nothing."""

    messages: MessageSocket
    address: str
    since: float
    challenge: Challenge


class Door:
    """All strangers, and where they come from."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: str,
        num_workers: int,
        admit: Callable[[MessageSocket, dict[str, Any]], bool],
    ) -> None:
        """Nobody comes before `open`.

        Args:
            selector: that the thread waits with; its keys' data are called when something has come.
            token: of the job.
            num_workers: that are expected.
            admit: takes over the connection of one that knows the token, with its first message; returns False where
                it is none of the workers all the same.
        """
        self._selector = selector
        self._token = token
        self._num_places = max(FEWEST_PLACES, num_workers)
        self._admit = admit
        self._listeners: list[socket.socket] = []
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._num_refused = 0
        self._resume: float | None = None

    def open(self, listener: socket.socket) -> None:
        """Let in who connects to it from now on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def tend(self) -> None:
        """Send those away that have had their time. In each turn."""
        now = time.monotonic()
        while self._strangers and now - (oldest := next(iter(self._strangers))).since > ANSWER_SECONDS:
            self._refuse(oldest, f"it has not said who it is within {ANSWER_SECONDS:g} s")
        if self._resume is not None and now >= self._resume:
            self._resume = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def close(self) -> None:
        """Everybody is in: nobody else is heard."""
        for listener in self._listeners:
            with suppress(KeyError):
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        self._resume = None
        for stranger in list(self._strangers):
            self._refuse(stranger, "everybody is in")
        if self._num_refused > MOST_LINES:
            logger.warning("%d connections in all that are not of this job were closed", self._num_refused)
        self._num_refused = 0

    def _accept(self, listener: socket.socket) -> None:
        """Take one: the others are for the next turns, so that those who are here have theirs."""
        try:
            accepted, (address, *_) = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if listener in self._listeners and self._resume is None:
                self._pause(error)
            return
        if len(self._strangers) >= self._num_places:
            crowd = Counter(stranger.address for stranger in self._strangers)
            most = max(crowd, key=crowd.__getitem__)
            self._refuse(next(s for s in self._strangers if s.address == most), "others wait behind it")
        messages = MessageSocket(accepted)
        stranger = _Stranger(messages, address, time.monotonic(), Challenge(self._token, messages))
        self._strangers[stranger] = None
        self._selector.register(messages, selectors.EVENT_READ, partial(self._hear, stranger))

    def _pause(self, error: OSError) -> None:
        """There is no room for one more connection, and the listener would be ready again at once."""
        logger.warning("no worker can connect for now: %s", error)
        self._resume = time.monotonic() + PAUSE_SECONDS
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _hear(self, stranger: _Stranger) -> None:
        if stranger not in self._strangers:
            return  # it has gone in this turn
        messages, introduction = stranger.messages, None
        try:
            line = messages.receive_line()
            if line is not None:
                introduction = stranger.challenge.read_answer(line)
        except Exception as error:  # a stranger's doing is its own end, whatever it is
            self._refuse(stranger, str(error) if isinstance(error, ValueError) else type(error).__name__)
            return
        if introduction is not None:
            self._leave(stranger)
            if not self._admit(messages, introduction):
                messages.close()
                self._tell(stranger, "it is no rank of this job")
        elif messages.is_closed:
            self._refuse(stranger, messages.fault or "it went without a word")

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        if stranger in self._strangers:
            self._leave(stranger)
        stranger.messages.close()
        self._tell(stranger, reason)

    def _leave(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        with suppress(KeyError, ValueError):
            self._selector.unregister(stranger.messages)

    def _tell(self, stranger: _Stranger, reason: str) -> None:
        """One line for a stranger, and none for the many."""
        self._num_refused += 1
        if self._num_refused <= MOST_LINES:
            last = "; further ones are counted, and not told" if self._num_refused == MOST_LINES else ""
            logger.warning("closed a connection from %s that is not of this job: %s%s", stranger.address, reason, last)
