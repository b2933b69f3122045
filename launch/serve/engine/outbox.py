"""The engine's way out to the frontend: what a round added becomes one message, written by the engine's own thread.

An event loop beside the rounds would have to wake up for each of them, and take the interpreter from the engine's
thread in its middle. So the thread that has made the deltas encodes them and hands them to the kernel, which takes less
time than waking somebody. Where the frontend does not read, they wait here and become one delta a completion; the event
loop then writes them when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from launch.serve.engine.messages import Deltas, Ended, Message, MessageError, encode
from trtrun.api.engine_thread import Outlet, Recipient
from trtrun.core.outputs import CompletionDelta, merge_deltas
from trtrun.errors import RankFailedError

logger = logging.getLogger(__name__)


class Outbox(Outlet):
    """Messages to the frontend. Any thread may send; none ever waits for the frontend."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Write to a connection.

        Args:
            connection: connected, not blocking, for writing alone: closed by `close`.
            loop: runs in another thread than the engine; asked to write on when the connection is full.
        """
        self._connection = connection
        self._loop = loop
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._round: list[CompletionDelta] = []
        self._late: dict[tuple[object, int], list[CompletionDelta]] = {}
        self._late_messages: list[Message] = []
        self._is_closed = False

    def add(self, delta: CompletionDelta) -> None:
        """What this round added to a completion; `flush` sends it. In the engine's thread."""
        self._round.append(delta)

    def flush(self, recipients: Sequence[Recipient]) -> None:
        """Send what the round added. In the engine's thread."""
        deltas, self._round = self._round, []
        with self._lock:
            if not self._unsent:
                self._write_deltas(deltas)
                return
            for delta in deltas:
                # By the time it is sent, the engine has counted on.
                copy = msgspec.structs.replace(delta, statistics=delta.statistics.copy())
                self._late.setdefault((delta.request_id, delta.index), []).append(copy)

    def send(self, message: Message) -> None:
        """Send a message, behind all that was sent before it."""
        with self._lock:
            if self._unsent:
                self._late_messages.append(message)
            else:
                self._write(encode(message))

    def offer(self, message: Message) -> None:
        """Send a message if it can go out at once; else it is worth nothing."""
        with self._lock:
            if not self._unsent:
                self._write(encode(message))

    def forget(self, request_id: str) -> None:
        """Nobody wants to know any more what waits here of a request."""
        with self._lock:
            for key in [key for key in self._late if key[0] == request_id]:
                del self._late[key]

    def close(self) -> None:
        """Send nothing any more. In the event loop."""
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

    def _write_deltas(self, deltas: Iterable[CompletionDelta]) -> None:
        told = []
        for delta in deltas:
            if delta.context_logits is None and delta.generation_logits is None:
                told.append(delta)
            else:  # by itself: logits are large, and the frontend reads a message at a stretch
                self._write(encode(Deltas(deltas=(delta,))))
        if not told:
            return
        try:
            self._write(encode(Deltas(deltas=tuple(told))))
        except MessageError:  # larger than a message may be: each by itself
            if len(told) == 1:
                raise
            for delta in told:
                self._write(encode(Deltas(deltas=(delta,))))

    def _write(self, data: bytes) -> None:
        """Hand data to the kernel, as much as it takes; the event loop sees to the rest. With the lock held."""
        if self._is_closed:
            return
        if self._unsent:
            self._unsent.append(memoryview(data))
            return
        sent = self._try_send(memoryview(data))
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._loop.call_soon_threadsafe(self._wait_for_room)

    def _try_send(self, data: memoryview) -> int:
        """How many bytes the kernel took."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the frontend is gone, which the reading side hears, too
            self._is_closed = True
            return len(data)

    def _wait_for_room(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._connection.fileno(), self._write_on)

    def _write_on(self) -> None:
        """There is room again. In the event loop."""
        with self._lock:
            while self._unsent:
                first = self._unsent[0]
                sent = self._try_send(first)
                if sent < len(first):
                    self._unsent[0] = first[sent:]
                    return
                self._unsent.popleft()
            self._loop.remove_writer(self._connection.fileno())
            late, self._late = self._late, {}
            messages, self._late_messages = self._late_messages, []
            self._write_deltas(merge_deltas(deltas) for deltas in late.values())
            for message in messages:
                self._write(encode(message))


class Sending(Recipient):
    """Sends what comes of one request to the frontend."""

    def __init__(self, outbox: Outbox, request_id: str, on_failure: Callable[[RankFailedError], None]) -> None:
        """Send through an outbox.

        Args:
            outbox: of the frontend's connection.
            request_id: of the request.
            on_failure: told, in the engine's thread, when a rank has failed.
        """
        super().__init__(outbox)
        self._outbox = outbox
        self._request_id = request_id
        self._on_failure = on_failure

    def _keep(self, delta: CompletionDelta) -> None:
        self._outbox.add(delta)

    def _keep_error(self, error: BaseException | None) -> None:
        if isinstance(error, RankFailedError):
            self._on_failure(error)
        elif error is None:
            self._outbox.forget(self._request_id)
        else:
            self._outbox.send(Ended(request_id=self._request_id, error=str(error)))
