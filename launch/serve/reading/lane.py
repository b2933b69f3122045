"""Some processes that read, and who waits for one: a request has a process to itself, and one that is lost is replaced.

It knows processes by `Child`, and no requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from launch.serve.door.limits import RESTART_RETRY_SECONDS, server_ending
from launch.serve.door.refusals import Kind, Refusal
from launch.serve.reading.child import GRACE_SECONDS, Child, Lost
from launch.serve.reading.messages import Reply, Task

RETRY_SECONDS = 5.0
"""After which another try to start a process makes sense, where the system had no room for one."""

logger = logging.getLogger(__name__)


class Lane:
    """Processes for requests of one kind. It belongs to one event loop."""

    def __init__(self, greeting: bytes, most: int) -> None:
        """Begin without a process.

        Args:
            greeting: of each process.
            most: processes at once.
        """
        self._greeting = greeting
        self._most = most
        self._all: set[Child] = set()
        self._idle: deque[Child] = deque()
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._recovering: set[asyncio.Task[None]] = set()
        self._trying: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def read(self, task: Task, body: bytes) -> tuple[Reply, list[bytes]]:
        """What comes of a task, with the blocks that follow it. A process that ended with it may have been killed for
        what it did before, as by a kernel without memory: then another one reads it.

        Raises:
            Refusal: it takes more time or memory than it may, or no process can read it.
        """
        try:
            return await self._read(task, body)
        except Lost:
            return await self._read(task, body)

    async def _read(self, task: Task, body: bytes) -> tuple[Reply, list[bytes]]:
        child = await self._take()
        working = asyncio.create_task(child.read(task, body))
        try:
            return await asyncio.shield(working)
        finally:
            if working.done():
                self._give_back(child)
            else:
                self._recover(child, working)

    def start_one(self) -> bool:
        """Start another process; whether there is one. If not, that is tried again later, and where no process is left
        nobody waits for one any longer."""
        try:
            child = Child(self._greeting)
        except OSError as error:
            logger.error("a process that reads requests cannot be started: %s", error)
            if not self._all:
                self._refuse_waiting(_no_process)
            if self._trying is None:
                self._trying = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)
            return False
        self._all.add(child)
        self._hand_on(child)
        return True

    def close(self) -> None:
        """End all of them."""
        self._is_closed = True
        if self._trying is not None:
            self._trying.cancel()
        for child in self._all:
            child.kill()
        for child in self._all:
            child.reap()
        self._refuse_waiting(server_ending)

    async def _take(self) -> Child:
        """A process that does nothing else.

        Raises:
            Refusal: there is none, and none can be started; or the server ends.
        """
        if self._is_closed:
            raise server_ending()
        while self._idle and self._idle[0].has_ended():
            self._leave(self._idle.popleft())
        if not self._idle and len(self._all) < self._most and not self.start_one() and not self._all:
            raise _no_process()
        if self._idle:
            return self._idle.popleft()
        waiting: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._give_back(waiting.result())
            raise

    def _give_back(self, child: Child) -> None:
        if child.is_fit:
            self._hand_on(child)
            return
        self._leave(child)
        if not self._is_closed:
            self.start_one()

    def _leave(self, child: Child) -> None:
        """End a process, if it has not ended yet, and count it no more."""
        child.kill()
        self._all.discard(child)
        with suppress(RuntimeError):  # no thread can be started; the next process that is started sees to it then
            asyncio.get_running_loop().run_in_executor(None, child.reap)

    def _hand_on(self, child: Child) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(child)
                return
        self._idle.append(child)

    def _refuse_waiting(self, refusal: Callable[[], Refusal]) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(refusal())

    def _try_again(self) -> None:
        self._trying = None
        if not self._is_closed and len(self._all) < self._most:
            self.start_one()

    def _recover(self, child: Child, working: asyncio.Task[tuple[Reply, list[bytes]]]) -> None:
        """Let a process end what nobody waits for, or end it."""

        async def wait() -> None:
            await asyncio.wait((working,), timeout=GRACE_SECONDS)
            if not working.done():
                child.kill()
            await asyncio.gather(working, return_exceptions=True)
            self._give_back(child)

        recovering = asyncio.create_task(wait())
        self._recovering.add(recovering)
        recovering.add_done_callback(self._recovering.discard)


def _no_process() -> Refusal:
    """What a request is told that nobody can read."""
    return Refusal(
        Kind.UNAVAILABLE,
        "the server cannot start a process that reads the request: send it again later",
        code="no_reader",
        retry_after=RESTART_RETRY_SECONDS,
    )
