"""Rank 0's connections to the workers: what each of them last said, and the questions put to them.

One thread uses it. Who is no worker gets no further than the `door`. It judges nothing: `heartbeat_server` does.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.watchdog.activity import Activity, Doing
from parallel.watchdog.fault_attribution import RankState
from parallel.watchdog.handshake import Door
from parallel.watchdog.message_socket import MessageSocket
from parallel.watchdog.processes import Stack, kill_process

logger = logging.getLogger(__name__)


@dataclass
class _Worker:
    """What is known of one worker; times as of time.monotonic()."""

    heard: float
    connection: MessageSocket | None = None
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
        self._unheard = set(ranks)
        self._question = 0
        self._new_listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._door = Door(self._selector, self.token, len(ranks), self._admit)
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._drain_wakes)

    # From any thread.

    def add_listener(self, listener: socket.socket) -> None:
        """Accept connections from it from now on, until every worker is there."""
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
                worker.connection.send({"lost": sorted(ranks)})

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
            self._door.open(self._new_listeners.pop())
        for key, _ in self._selector.select(timeout):
            key.data()
        self._door.tend()

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
                worker.connection.send({"question": self._question})
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
                worker.connection.send({"goodbye": True})

    def close(self) -> None:
        """Close everything."""
        self._door.close()
        for worker in self._workers.values():
            if worker.connection is not None:
                worker.connection.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    # Single connections.

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)

    def _admit(self, messages: MessageSocket, introduction: dict[str, Any]) -> bool:
        """Take over the connection of one that knows the token; False where it is none of the workers."""
        rank = introduction.get("rank")
        if not isinstance(rank, int) or rank not in self._workers:
            return False
        worker = self._workers[rank]
        if worker.connection is not None:
            self._drop(worker, worker.connection)
        worker.connection, worker.closed, worker.heard = messages, None, time.monotonic()
        worker.process = introduction.get("process")
        self._selector.register(messages, selectors.EVENT_READ, partial(self._serve, rank, messages))
        messages.send({"rank": rank})
        return True

    def _serve(self, rank: int, messages: MessageSocket) -> None:
        worker = self._workers[rank]
        messages.flush()
        for message in messages.receive():
            self._hear(messages, worker, message)
            self._unheard.discard(rank)
        if messages.is_closed:
            self._drop(worker, messages)
        if not self._unheard:
            self._door.close()  # nobody else is to come

    def _hear(self, messages: MessageSocket, worker: _Worker, message: dict[str, Any]) -> None:
        worker.heard = time.monotonic()
        if "failed" in message and worker.failure is None:
            worker.failure = str(message["failed"])
        if "doing" in message:
            with suppress(TypeError, ValueError):
                worker.doing = Doing.from_dict(message["doing"])
            messages.send({"doing": self._activity.look().as_dict()})
        elif "stack" in message and message.get("question") == self._question:
            worker.stack = Stack(str(message["stack"]), message.get("waits") is True)
            worker.answered = self._question
        elif "goodbye" in message:
            worker.has_left = True

    def _drop(self, worker: _Worker, messages: MessageSocket) -> None:
        if messages.fault:
            logger.warning("the connection of a worker is closed, for somebody has changed it: %s", messages.fault)
        with suppress(KeyError, ValueError):
            self._selector.unregister(messages)
        messages.close()
        if worker.connection is messages:
            worker.connection, worker.closed = None, time.monotonic()
