"""Keeps an engine running: starts it, sees whether it gets on, hears that it has ended, starts it again, and gives up
when it ends too often.

An engine tells about once a second where each of its threads stands, in rounds and outside of them. It hangs where it
is silent, or where a thread stands still for longer than its phase may take, and where it is not up after
launch.start_seconds. The ranks of a job watch each other (`parallel.watchdog`): of these the frontend asks only that
rank 0 goes on telling. It does not know what an engine does (`process`) or what it is told (`client`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from launch.exit_codes import ExitCode, FailedError
from launch.jobs.mpi.processes import ending_with_parent
from launch.jobs.mpi.supervise import GRACE_SECONDS
from launch.serve.engine.messages import Heartbeat, Standing
from launch.serve.engine.standby import Standby
from parallel.watchdog.heartbeat_server import PATIENCE_HEARTBEATS, heartbeat_interval
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology

SILENT_TIMES = 2
"""How many times launch.heartbeat_seconds a job of several ranks may be silent: their own watch, which names the rank,
comes before."""


def is_watched(config: RuntimeConfig) -> bool:
    """Whether nobody but the frontend watches the engine: where it is one process."""
    return make_topology(config).world_size == 1


class EngineWatch:
    """What is known of one engine after the other.

    Attributes:
        interval: seconds between two heartbeats, and between two looks.
    """

    def __init__(self, limit: float, start_limit: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch one that starts now. How long its threads may stand still, it says itself.

        Args:
            limit: seconds that an engine may be silent.
            start_limit: seconds from its start to its first heartbeat; None where its start is watched elsewhere.
            clock: seconds; for tests.
        """
        self.interval = heartbeat_interval(limit)
        self._limit = limit
        self._start_limit = start_limit
        self._clock = clock
        self._last: Heartbeat | None = None
        self._begun = self._heard = self._looked = clock()

    def hear(self, heartbeat: Heartbeat) -> None:
        """The engine tells what it is doing."""
        self._last, self._heard = heartbeat, self._clock()

    def forget(self) -> None:
        """Forget an engine that is over; another one may start now."""
        self._last, self._begun = None, self._clock()

    def find_fault(self) -> str | None:
        """Find out why the engine has to be ended, once it hangs. Called about once an interval."""
        now, before = self._clock(), self._looked
        self._looked = now
        # The frontend was stopped, or busy: that is no news of the engine.
        if now - before > PATIENCE_HEARTBEATS * self.interval:
            self._heard = now
            self._begun += now - before
        if self._last is None:
            if self._start_limit is None or now - self._begun <= self._start_limit:
                return None
            self._begun = now
            return f"it has not started within {self._start_limit:g} s (launch.start_seconds)"
        if now - self._heard > self._limit:
            return f"it is silent for {self._limit:g} s, last seen {self._last.standings[0].doing}"
        late = find_late(self._last)
        return None if late is None else f"it stands still {late.doing} for longer than {late.limit:g} s"

    @property
    def late_phase(self) -> str | None:
        """The kind of the phase in which the engine stands still; None where it does not."""
        late = None if self._last is None else find_late(self._last)
        return None if late is None else late.phase


def find_late(heartbeat: Heartbeat) -> Standing | None:
    """The first thread that stands still for longer than it may."""
    return next((one for one in heartbeat.standings if one.limit is not None and one.still_seconds > one.limit), None)


END_SECONDS = 2 * GRACE_SECONDS
"""How long an engine may take to end once it has nothing to say any more: mpirun's ranks, and its parent after them."""

RETRY_SECONDS = 10.0
"""Until an engine is started again that could not start, and has said why: there may be too little memory just now."""

logger = logging.getLogger(__name__)


@dataclass
class RestartLimit:
    """How often something may be started again.

    Attributes:
        most: restarts within the window.
        window: seconds.
        clock: seconds; for tests.
    """

    most: int
    window: float
    clock: Callable[[], float] = time.monotonic
    _restarts: deque[tuple[float, int | None]] = field(default_factory=deque)
    _forgiven: set[int] = field(default_factory=set)

    def allow(self, engine: int | None = None) -> bool:
        """Count a restart; whether it is within the limit.

        Args:
            engine: number of the engine that has ended; None where it was never there.
        """
        if engine in self._forgiven:
            return True
        now = self.clock()
        while self._restarts and now - self._restarts[0][0] > self.window:
            self._restarts.popleft()
        if len(self._restarts) >= self.most:
            return False
        self._restarts.append((now, engine))
        return True

    def forgive(self, engines: Collection[int]) -> None:
        """Do not count the ends of these engines, not even one that is about to be: something else is to blame."""
        self._forgiven.update(engines)
        self._restarts = deque(restart for restart in self._restarts if restart[1] not in self._forgiven)

    @property
    def engines(self) -> list[int | None]:
        """Engines whose ends are counted."""
        return [engine for _, engine in self._restarts]

    def __str__(self) -> str:
        return f"{len(self._restarts)} of {self.most} within {self.window:g} s"


class EngineKeeper:
    """Keeps one engine at a time, in a child process. An engine that ends before one was ever up is not started
    again."""

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        may_restart: Callable[[], bool],
        limit: RestartLimit,
        on_restart: Callable[[str], None],
        on_early_end: Callable[[str], None],
        standby: Standby | None = None,
    ) -> None:
        """Keep what a command starts.

        Args:
            command: gives the words that start the next engine.
            environment: of the engine.
            may_restart: asked when an engine has ended, whether it may be started again.
            limit: on restarts, for what is told of them.
            on_restart: called with a line for the user before each.
            on_early_end: called with such a line where an engine was killed before it was up, and could not say so.
            standby: makes engines that wait for their turn; None where each is started when it is.
        """
        self._standby = standby
        self._preparing: asyncio.Task[None] | None = None
        self._command = command
        self._environment = dict(environment)
        self._may_restart = may_restart
        self._limit = limit
        self._on_restart = on_restart
        self._on_early_end = on_early_end
        self._process: asyncio.subprocess.Process | None = None
        self._was_up = self._is_up = False
        self._closing = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def note_up(self) -> None:
        """The engine is there."""
        self._was_up = self._is_up = True
        if self._standby is not None and not self._closing.is_set():
            self._preparing = asyncio.create_task(self._standby.prepare())

    def note_silence(self) -> None:
        """The engine says nothing any more: it has to end soon."""
        if self._process is not None and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(END_SECONDS, self._end_late)

    async def keep(self) -> int:
        """Start the engine, and start it again when it ends, until `close`.

        Returns:
            The engine's exit status: of one that was told to end, or that ended before it was ever up.

        Raises:
            FailedError: it ended too often.
        """
        try:
            return await self._keep()
        finally:
            await self._end_standby()

    async def _keep(self) -> int:
        while True:
            self._process = process = await self._begin()
            self._is_up = False
            if self._closing.is_set():
                self.note_silence()
            status = await process.wait()
            self._process = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            cause = _describe_end(status)
            if self._closing.is_set() or not self._was_up:
                if status < 0 and not self._closing.is_set():
                    self._on_early_end(f"{cause} before it was up")
                return _status(status)
            if not self._may_restart():
                raise FailedError(
                    f"{cause}, and was started again {self._limit} (server.max_restarts, server.restart_window_s): "
                    "the server ends"
                )
            waits = not self._is_up and status == ExitCode.REFUSED
            when = f"in {RETRY_SECONDS:g} s " if waits else ""
            self._on_restart(f"{cause}; it is started again {when}({self._limit}), and requests go on when it is up")
            if waits and await self._is_closed_within(RETRY_SECONDS):
                return _status(status)

    async def _begin(self) -> asyncio.subprocess.Process:
        """The next engine: one that stood by, or a new one."""
        if self._preparing is not None:
            await self._preparing
        waiting = None if self._standby is None else self._standby.take()
        if waiting is not None:
            return waiting
        # stdout stays the frontend's: ranks have nothing to write there. A session of its own keeps Ctrl-C from it.
        return await asyncio.create_subprocess_exec(
            *ending_with_parent(self._command()),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _end_standby(self) -> None:
        """End what stands by: its turn does not come."""
        if self._standby is None:
            return
        if self._preparing is not None:
            await self._preparing
        waiting = self._standby.give_up()
        if waiting is not None:
            _end(waiting)
            await waiting.wait()
        self._standby.forget()

    async def close(self) -> None:
        """Let the engine end, which was asked to, or end it; and do not start it again."""
        self._closing.set()
        self.note_silence()
        while self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1.0)

    def end_hung(self, cause: str, *, has_ranks: bool = False) -> None:
        """The engine hangs: end it, so that it is started again. The parent of ranks ends these first."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        logger.error("the engine (process %d) hangs: %s", process.pid, cause)
        if has_ranks:
            self._end()
            return
        with suppress(ProcessLookupError):
            process.kill()

    def kill(self) -> None:
        """End the engine now."""
        self._closing.set()
        self._end()

    async def _is_closed_within(self, seconds: float) -> bool:
        """Whether `close` or `kill` comes within so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    def _end_late(self) -> None:
        """The engine had to end by itself, and its time for that is over."""
        if self._process is not None and self._process.returncode is None:
            logger.warning("the engine (process %d) has not ended by itself", self._process.pid)
        self._end()

    def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            _end(self._process)


def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, which it passes on to its ranks; one that does not is killed."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    loop.call_later(END_SECONDS, lambda: process.kill() if process.returncode is None else None)


def engine_command(arguments: Sequence[str]) -> list[str]:
    """The words that start an engine with arguments of `trtrun serve-engine`."""
    return [sys.executable, "-m", "launch.cli", "serve-engine", *arguments]


def _status(status: int) -> int:
    """An exit status as shells count it."""
    return status if status >= 0 else 128 - status


def _describe_end(status: int) -> str:
    if status > 128 or status < 0:
        number = -status if status < 0 else status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"the engine was ended by {name}"
    return f"the engine ended with status {status}"
