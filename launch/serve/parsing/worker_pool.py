"""Processes that read, as the frontend has them: started, given a request, ended; and who waits for one. A request has
a process to itself, and one that is lost is replaced.

What they run is `launch.serve.application.parser_worker`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from launch.serve.admission.control import OWNER
from launch.serve.admission.refusals import RESTART_RETRY_SECONDS, Kind, Refusal, server_ending
from launch.serve.parsing.messages import (
    BLOCK_HEAD_BYTES,
    CHANGED,
    HEAD_BYTES,
    Refused,
    Reply,
    Task,
    pack,
    too_much_memory,
    unpack,
)

GRACE_SECONDS = 0.5
"""How long a worker may go on with a request that nobody waits for, before it is ended: starting another one takes as
long. So long its end may take, too."""

_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_")
"""How variables begin that make a rank of a process."""

PROGRAM = (sys.executable, "-m", "launch.serve.application.parser_worker")

logger = logging.getLogger(__name__)


class Lost(Refusal):
    """The process has ended with a request, which need not have been the cause: it did not use up what it may."""


class ParserWorker:
    """A process that parses one request at a time.

    Attributes:
        is_fit: whether it reads another one.
        pid: of it.
    """

    def __init__(self, greeting: bytes) -> None:
        """Start it.

        Args:
            greeting: what it is to know before the first request. It makes itself ready with that at once.

        Raises:
            OSError: the system has no room for another process.
        """
        self.is_fit = True
        self._is_killed = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        num_sent = 0
        with theirs:
            with suppress(BlockingIOError):
                num_sent = self._ours.send(greeting)
            try:
                # In a session of its own: what a terminal or a batch system sends to all of the frontend's is not for
                # it, not even while it starts. It ends with the frontend all the same, by the kernel's word.
                self._process = subprocess.Popen(
                    [*PROGRAM, str(os.getpid())], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=_environment(),
                    start_new_session=True,
                )  # fmt: skip
            except OSError:
                self._ours.close()
                raise
        self._unsent = greeting[num_sent:]
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        """Whether it is gone, whoever ended it."""
        return self._process.poll() is not None

    async def read(self, task: Task, body: bytes) -> tuple[Reply, list[bytes]]:
        """Do a task; returns the reply and the blocks that follow it.

        Raises:
            Refusal: the process has ended with it, as one does that takes too much; `Lost` where that is not known.
        """
        is_whole = False
        try:
            reader, writer = await self._open()
            writer.write(pack(task))
            writer.write(len(body).to_bytes(BLOCK_HEAD_BYTES, "big"))
            writer.write(body)
            head = await reader.readexactly(HEAD_BYTES)
            reply = unpack(await reader.readexactly(int.from_bytes(head, "big")), Reply)
            blocks = [await reader.readexactly(size) for size in reply.sizes]
            is_whole = True
        except (OSError, EOFError, msgspec.DecodeError):
            raise await self._tell_end(task) from None
        finally:
            # It may have been killed when the reply was there already.
            self.is_fit = is_whole and not reply.is_last and not self._is_killed
        if isinstance(reply.result, Refused) and reply.result.code == CHANGED:
            logger.error("%s", reply.result.reason)
        return reply, blocks

    def kill(self) -> None:
        """End it, whatever it does; calling it again does nothing."""
        self.is_fit, self._is_killed = False, True
        if self._process.poll() is None:
            self._process.kill()
        if self._streams is None:
            self._ours.close()
        else:
            self._streams[1].close()

    def reap(self) -> None:
        """Wait for the end of one that is killed."""
        self._process.wait()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._ours)
            self._streams[1].write(self._unsent)
            self._unsent = b""
        return self._streams

    async def _tell_end(self, task: Task) -> Refusal:
        """Tell why the worker has ended with a task."""
        status = None
        with suppress(subprocess.TimeoutExpired, RuntimeError):  # the latter where there is no thread to be had
            status = await asyncio.to_thread(self._process.wait, GRACE_SECONDS)
        if status == -signal.SIGPROF:
            return Refusal(
                Kind.TOO_LARGE,
                f"reading the request takes more than {task.seconds:.0f} s of processor time: send less at once, or a "
                "simpler guide",
            )
        if status == -signal.SIGABRT:  # how libraries that are not Python's end where there is no memory
            return too_much_memory()
        if not self._is_killed:
            logger.error("a process that reads requests has ended: status %s", status)
        return Lost(Kind.FAILED, "the process that read the request has ended: send less at once, or again later")


def _environment() -> dict[str, str]:
    """The environment of a worker: one thread, and no rank of a job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_MPI)}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


RETRY_SECONDS = 5.0
"""Seconds after which another try to start a process makes sense, where the system had no room for one."""


class WorkerPool:
    """Processes for requests of one kind. It belongs to one event loop."""

    def __init__(self, greeting: bytes, most: int) -> None:
        """Begin without a process.

        Args:
            greeting: of each process.
            most: processes at once.
        """
        self._greeting = greeting
        self._most = most
        self._all: set[ParserWorker] = set()
        self._idle: deque[ParserWorker] = deque()
        # In turns between owners: the next one first, those of each in their order.
        self._waiting: OrderedDict[str, deque[asyncio.Future[ParserWorker]]] = OrderedDict()
        self._recovering: set[asyncio.Task[None]] = set()
        self._trying: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def read(self, task: Task, body: bytes) -> tuple[Reply, list[bytes]]:
        """Do a task; returns the reply and the blocks that follow it. A process that ended with it may have been killed
        for what it did before, as by a kernel without memory: then another one reads it.

        Raises:
            Refusal: it takes more time or memory than it may, or no process can read it.
        """
        try:
            return await self._read(task, body)
        except Lost:
            return await self._read(task, body)

    async def _read(self, task: Task, body: bytes) -> tuple[Reply, list[bytes]]:
        worker = await self._take()
        working = asyncio.create_task(worker.read(task, body))
        try:
            return await asyncio.shield(working)
        finally:
            if working.done():
                self._give_back(worker)
            else:
                self._recover(worker, working)

    def start_one(self) -> bool:
        """Start another process; whether there is one. If not, that is tried again later, and where no process is left
        nobody waits for one any longer."""
        try:
            worker = ParserWorker(self._greeting)
        except OSError as error:
            logger.error("a process that reads requests cannot be started: %s", error)
            if not self._all:
                self._refuse_waiting(_no_process)
            if self._trying is None:
                self._trying = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)
            return False
        self._all.add(worker)
        self._hand_on(worker)
        return True

    def close(self) -> None:
        """End all of them."""
        self._is_closed = True
        if self._trying is not None:
            self._trying.cancel()
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.reap()
        self._refuse_waiting(server_ending)

    async def _take(self) -> ParserWorker:
        """Take a worker that does nothing else.

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
        waiting: asyncio.Future[ParserWorker] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(OWNER.get(), deque()).append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._give_back(waiting.result())
            raise

    def _give_back(self, worker: ParserWorker) -> None:
        if worker.is_fit:
            self._hand_on(worker)
            return
        self._leave(worker)
        if not self._is_closed:
            self.start_one()

    def _leave(self, worker: ParserWorker) -> None:
        """End a process, if it has not ended yet, and count it no more."""
        worker.kill()
        self._all.discard(worker)
        with suppress(RuntimeError):  # no thread can be started; the next process that is started sees to it then
            asyncio.get_running_loop().run_in_executor(None, worker.reap)

    def _hand_on(self, worker: ParserWorker) -> None:
        for waiting in self._in_turn():
            if not waiting.done():
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def _refuse_waiting(self, refusal: Callable[[], Refusal]) -> None:
        for waiting in self._in_turn():
            if not waiting.done():
                waiting.set_exception(refusal())

    def _in_turn(self) -> Iterator[asyncio.Future[ParserWorker]]:
        """Yield those who wait, in turn between owners; each waits no more then."""
        while self._waiting:
            owner, waiting = self._waiting.popitem(last=False)
            found = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            yield found

    def _try_again(self) -> None:
        self._trying = None
        if not self._is_closed and len(self._all) < self._most:
            self.start_one()

    def _recover(self, worker: ParserWorker, working: asyncio.Task[tuple[Reply, list[bytes]]]) -> None:
        """Let a process end what nobody waits for, or end it."""

        async def wait() -> None:
            await asyncio.wait((working,), timeout=GRACE_SECONDS)
            if not working.done():
                worker.kill()
            await asyncio.gather(working, return_exceptions=True)
            self._give_back(worker)

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
