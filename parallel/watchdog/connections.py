"""Rank 0's connections to the workers: what each of them last said, and the questions put to them.

One thread uses it. It lets in nobody who does not know the job's token, and judges nothing: `heartbeat_server` does.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from parallel.watchdog.activity import Activity, Doing
from parallel.watchdog.blame import RankState
from parallel.watchdog.message_socket import ANSWER_SECONDS, FEW_BYTES, MOST_BYTES, Challenge, MessageSocket, prove
from parallel.watchdog.processes import kill_process
from parallel.watchdog.stacks import Stack

FEWEST_STRANGERS = 64
"""Connections that may be open without having proved who they are; as many as workers, where those are more. One that
comes beyond that takes the place of the one that has been silent for longest: a worker proves itself at once."""


@dataclass
class _Connection:
    """One connection. `rank` is None until it has proved who it is."""

    messages: MessageSocket
    since: float
    challenge: Challenge
    rank: int | None = None


@dataclass
class _Worker:
    """What is known of one worker; times as of time.monotonic()."""

    heard: float
    connection: _Connection | None = None
    doing: Doing | None = None
    closed: float | None = None
    has_left: bool = False
    failure: str | None = None
    stack: Stack | None = None
    answered: int = -1
    process: object = None
    is_lost: bool = False


class WorkerConnections:
    """All workers, connected or not.

    Attributes:
        token: what they must know.
    """

    def __init__(self, ranks: Sequence[int], activity: Activity) -> None:
        """Expect workers.

        Args:
            ranks: of the workers.
            activity: of this process, told to them with each answer.
        """
        self.token = secrets.token_hex(32)
        self._activity = activity
        self._workers = {rank: _Worker(time.monotonic()) for rank in ranks}
        self._strangers = 0
        self._question = 0
        self._new_listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)

    # From any thread.

    def add_listener(self, listener: socket.socket) -> None:
        """Accept connections from it from now on."""
        listener.setblocking(False)
        self._new_listeners.append(listener)
        self.wake()

    def wake(self) -> None:
        """Let `serve` return at once."""
        with suppress(OSError):
            self._waker.send(b"x")

    # From the one thread.

    @property
    def all_are_gone(self) -> bool:
        """Whether nobody is connected, apart from lost workers."""
        return all(worker.connection is None for worker in self._workers.values() if not worker.is_lost)

    @property
    def lost_are_gone(self) -> bool:
        """Whether every lost worker's end is known: its connection is closed from its side."""
        return all(worker.connection is None for worker in self._workers.values() if worker.is_lost)

    def states(self) -> list[RankState]:
        """What is known now of each worker that is not lost."""
        now = time.monotonic()
        return [
            RankState(
                rank,
                worker.doing,
                now - worker.heard,
                None if worker.closed is None else now - worker.closed,
                worker.has_left,
            )
            for rank, worker in self._workers.items()
            if not worker.is_lost
        ]

    def first_failure(self) -> tuple[int, str] | None:
        """A worker that has told of its failure and is not lost, and the cause; None while there is none."""
        told = ((rank, worker.failure) for rank, worker in self._workers.items() if not worker.is_lost)
        return next(((rank, failure) for rank, failure in told if failure is not None), None)

    def lose(self, ranks: Collection[int]) -> None:
        """Count some workers no more, and tell all of them so: the lost ones end, those that wait for them stop."""
        for rank in ranks:
            self._workers[rank].is_lost = True
        for worker in self._workers.values():
            if worker.connection is not None:
                worker.connection.messages.send({"lost": sorted(ranks)})

    def kill_lost(self) -> None:
        """Kill the lost workers of this host that have not ended by themselves."""
        for worker in self._workers.values():
            if worker.is_lost and worker.connection is not None:
                kill_process(worker.process)

    def forgive(self) -> None:
        """Count silence from now on."""
        for worker in self._workers.values():
            worker.heard = time.monotonic()

    def serve(self, timeout: float) -> None:
        """Take in what comes within `timeout` seconds, or what is there once something comes."""
        while self._new_listeners:
            listener = self._new_listeners.pop()
            self._selector.register(listener, selectors.EVENT_READ, listener)
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, _Connection):
                self._serve(key.data)
            elif key.data is not None:
                self._accept(key.data)
            else:
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)
        if self._strangers:
            for connection in self._connections():
                if connection.rank is None and time.monotonic() - connection.since > ANSWER_SECONDS:
                    self._drop(connection)

    def new_question(self) -> None:
        """Stacks taken before are old from now on."""
        self._question += 1

    def gather_stacks(self, seconds: float, patience: float) -> dict[int, Stack]:
        """Ask the workers that have not sent their stacks yet; all stacks that are there within `seconds`.

        Nobody waits for a worker that has been silent for longer than `patience` seconds: of a host that is cut off the
        user is to hear from here, and not only that mpirun has lost it, too.
        """
        asked = []
        for worker in self._workers.values():
            left = worker.has_left or worker.is_lost
            if worker.connection is not None and worker.answered != self._question and not left:
                worker.connection.messages.send({"question": self._question})
                asked.append(worker)
        now = time.monotonic()
        deadline = now + seconds
        while now < deadline and any(
            worker.answered != self._question and now - worker.heard <= patience for worker in asked
        ):
            self.serve(0.05)
            now = time.monotonic()
        return {
            rank: worker.stack
            for rank, worker in self._workers.items()
            if worker.stack is not None and worker.answered == self._question
        }

    def say_goodbye(self) -> None:
        """Tell all workers that nobody watches any more; they close their connections."""
        for worker in self._workers.values():
            if worker.connection is not None:
                worker.connection.messages.send({"goodbye": True})

    def close(self) -> None:
        """Close everything."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                key.data.messages.close()
            elif key.data is not None:
                key.data.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    # Single connections.

    def _connections(self) -> list[_Connection]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Connection)]

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            accepted, _ = listener.accept()
            if self._strangers >= max(FEWEST_STRANGERS, len(self._workers)):
                strangers = (connection for connection in self._connections() if connection.rank is None)
                self._drop(min(strangers, key=lambda stranger: stranger.since))
            connection = _Connection(MessageSocket(accepted, FEW_BYTES), time.monotonic(), Challenge(self.token))
            self._strangers += 1
            self._selector.register(connection.messages, selectors.EVENT_READ, connection)
            connection.messages.send({"nonce": connection.challenge.nonce})

    def _serve(self, connection: _Connection) -> None:
        connection.messages.flush()
        for message in connection.messages.receive():
            if connection.rank is not None:
                self._hear(connection, self._workers[connection.rank], message)
            elif not self._admit(connection, message):
                connection.messages.is_closed = True
                break
        if connection.messages.is_closed:
            self._drop(connection)

    def _admit(self, connection: _Connection, message: dict[str, Any]) -> bool:
        rank = message.get("rank")
        worker = self._workers.get(rank) if isinstance(rank, int) else None
        if worker is None or not connection.challenge.accepts(message.get("proof"), "client"):
            return False
        self._strangers -= 1
        connection.messages.most_bytes = MOST_BYTES
        connection.rank, worker.connection, worker.closed, worker.heard = rank, connection, None, time.monotonic()
        worker.process = message.get("process")
        connection.messages.send({"proof": prove(self.token, "server", message.get("nonce"))})
        return True

    def _hear(self, connection: _Connection, worker: _Worker, message: dict[str, Any]) -> None:
        worker.heard = time.monotonic()
        if "failed" in message and worker.failure is None:
            worker.failure = str(message["failed"])
        if "doing" in message:
            with suppress(TypeError, ValueError):
                worker.doing = Doing.from_dict(message["doing"])
            connection.messages.send({"doing": self._activity.look().as_dict()})
        elif "stack" in message and message.get("question") == self._question:
            worker.stack = Stack(str(message["stack"]), message.get("waits") is True)
            worker.answered = self._question
        elif "goodbye" in message:
            worker.has_left = True

    def _drop(self, connection: _Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.messages)
        connection.messages.close()
        if connection.rank is None:
            self._strangers -= 1
            return
        worker = self._workers[connection.rank]
        if worker.connection is connection:
            worker.connection, worker.closed = None, time.monotonic()
