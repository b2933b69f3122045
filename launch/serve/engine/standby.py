"""The next engine's processes, which wait for their turn: all that needs neither weights nor a device is done.

They have imported what takes seconds and have met over MPI. They hold host memory, and no device's. The front says that
it is their turn over a socket of its own; ranks other than 0 hear of it over MPI, and look twenty times a second. Until
then nobody watches them: so rank 0 answers once all have heard.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from launch.exit_codes import FailedError
from launch.jobs.mpi.processes import ending_with_parent
from launch.serve.engine.handshake import connect, listen, make_name
from parallel.mpi_rank import find_mpi_rank

_TURN, _HEARD = b"t", b"h"
_LOOK_SECONDS = 0.05
_LOOK_SECONDS_AT_TURN = 0.001
_IMPORTED_LATER = ("triton", "cupy")
"""What ranks with GPUs import while they load."""

logger = logging.getLogger(__name__)


class Standby:
    """The front's side: at most one next engine.

    Args:
        command: gives the words that start it; `--turn NAME` is added.
        environment: of the engine.
        on_news: called with a line for the user once it waits.
        seconds: how long its ranks may take to hear of their turn.
        on_silence: called where they have not.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        on_news: Callable[[str], None],
        seconds: float,
        on_silence: Callable[[], None],
    ) -> None:
        self._command, self._environment = command, environment
        self._make_turn = partial(_Turn, on_news, seconds, on_silence)
        self._process: Process | None = None
        self._server: asyncio.Server | None = None
        self._turn = self._make_turn()
        self._watching: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Start the next engine's processes, unless some wait already. Where they cannot be started, there are none."""
        if self._process is not None and self._process.returncode is None:
            return
        self.forget()
        self._turn, name = self._make_turn(), make_name()
        try:
            self._server = await listen(name, self._turn.tell)
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_parent([*self._command(), "--turn", name]),
                env=dict(self._environment), stdin=DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._watching = asyncio.create_task(self._tell_end(self._process, self._turn))
        except OSError as error:
            logger.warning("no engine stands by: %s", error)

    def take(self) -> Process | None:
        """The engine whose turn it is now; None where none waits. It belongs to the caller."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return None
        self._turn.settle(has_come=True)
        return process

    def give_up(self) -> Process | None:
        """Nobody's turn comes any more; returns what is to be ended. `forget` comes behind its end: an engine that
        hears of it says so to the user."""
        process, self._process = self._process, None
        if self._watching is not None:
            self._watching.cancel()
        return process if process is not None and process.returncode is None else None

    def forget(self) -> None:
        """Whoever waits still waits in vain, and is told so."""
        self._turn.settle(has_come=False)
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _tell_end(self, process: Process, turn: _Turn) -> None:
        """Say that an engine has ended that nobody has taken or given up: it will not be there when it is needed."""
        status = await process.wait()
        if not turn.is_settled:
            logger.warning("no engine stands by any more: it has ended with status %d", status)


class _Turn:
    """The turn of one engine, which comes or does not, as is told to whoever asks."""

    def __init__(self, on_news: Callable[[str], None], seconds: float, on_silence: Callable[[], None]) -> None:
        self._on_news, self._seconds, self._on_silence = on_news, seconds, on_silence
        self._is_settled = asyncio.Event()
        self._has_come = False

    @property
    def is_settled(self) -> bool:
        """Whether it has come, or never will."""
        return self._is_settled.is_set()

    def settle(self, *, has_come: bool) -> None:
        """The first time counts."""
        if not self.is_settled:
            self._has_come = has_come
            self._is_settled.set()

    async def tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: nothing comes where the turn does not. Who is there answers; who has ended closes it."""
        if not self.is_settled:
            self._on_news("the next engine stands by")
        await self._is_settled.wait()
        with suppress(ConnectionError):
            if self._has_come:
                writer.write(_TURN)
                await writer.drain()
                try:
                    await asyncio.wait_for(reader.read(len(_HEARD)), self._seconds)
                except TimeoutError:
                    self._on_silence()
        writer.close()


def wait_for_turn(name: str, *, has_gpus: bool) -> None:
    """A rank's side: wait until the front says at a socket that it is this engine's turn. Collective over its ranks.

    Raises:
        FailedError: the front is gone.
    """
    for module in _IMPORTED_LATER if has_gpus else ():
        with suppress(ImportError):
            importlib.import_module(module)
    place = find_mpi_rank()
    if place is not None and place.rank != 0:
        _meet()
        return
    with connect(name) as connection:
        if connection.recv(len(_TURN)) != _TURN:
            raise FailedError("the front has ended before it was this engine's turn")
        if place is not None and place.size > 1:
            _meet()
        with suppress(OSError):  # the front is gone, and so will this process be
            connection.sendall(_HEARD)


def _meet() -> None:
    """Wait for all ranks, and then for all to have done so: a rank that was stopped may have sent its first message."""
    from mpi4py import MPI

    for seconds in (_LOOK_SECONDS, _LOOK_SECONDS_AT_TURN):
        meeting = MPI.COMM_WORLD.Ibarrier()
        while not meeting.Test():  # MPI's own waiting burns a core
            time.sleep(seconds)
