"""One process that reads, as the front has it: started, given a request, ended. It knows no other one, and no requests.

What it runs is `launch.serve.reader.process`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import msgspec

from launch.serve.door.refusals import Kind, Refusal
from launch.serve.reading.frames import BLOCK_HEAD_BYTES, HEAD_BYTES, pack, unpack
from launch.serve.reading.messages import CHANGED, Refused, Reply, Task, too_much_memory

GRACE_SECONDS = 0.5
"""How long a reader may go on with a request that nobody waits for, before it is ended: starting another one takes as
long. So long its end may take, too."""

_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_")
"""How variables begin that make a rank of a process."""

logger = logging.getLogger(__name__)


class Lost(Refusal):
    """The process has ended with a request, which need not have been the cause: it did not use up what it may."""


class Child:
    """One process, which reads one request at a time.

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
            command = [sys.executable, "-m", "launch.serve.reader.process", str(os.getpid())]
            try:
                # In a session of its own: what a terminal or a batch system sends to all of the front's is not for it,
                # not even while it starts. It ends with the front all the same, by the kernel's word.
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=_environment(),
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
        """What comes of a task, with the blocks that follow it.

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
        """Why it has ended with a task."""
        status = None
        with suppress(subprocess.TimeoutExpired, RuntimeError):  # the latter where there is no thread to be had
            status = await asyncio.to_thread(self._process.wait, GRACE_SECONDS)
        if status == -signal.SIGPROF:
            line = f"reading the request takes more than {task.seconds:.0f} s of processor time: send less at once"
            return Refusal(Kind.TOO_LARGE, line)
        if status == -signal.SIGABRT:  # how libraries that are not Python's end where there is no memory
            return too_much_memory()
        if not self._is_killed:
            logger.error("a process that reads requests has ended: status %s", status)
        return Lost(Kind.FAILED, "the process that read the request has ended: send less at once, or again later")


def _environment() -> dict[str, str]:
    """Of a process: one thread, and no rank of a job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_MPI)}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
