"""Rank 0's port as far as those come who have not proved that they belong to the job.

Whatever a stranger sends, and however fast, costs its own connection: it has a few bytes and seconds for one line,
which is compared and not parsed; there are few places, and those of one address crowd out each other; and the port
closes once every worker is in. Who is let in is handed on. One thread uses it. It does not know what workers say.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.watchdog.handshake import ANSWER_SECONDS, Challenge
from parallel.watchdog.message_socket import MessageSocket

logger = logging.getLogger(__name__)

FEWEST_PLACES = 64
"""For connections that have not proved who they are; as many as workers, where those are more. One that comes beyond
that takes the place of the oldest of the address that holds the most: a worker proves itself at once."""

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
