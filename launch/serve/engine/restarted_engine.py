"""An engine in processes of its own, which is started again when it ends: keeper, socket and client joined.

An engine goes on with the requests of the one before it only if it is the same once more: it has read the same
configuration and the same files, and has the same room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.exit_codes import FailedError
from launch.jobs.mpi.mpirun import build_environment
from launch.serve.engine.client import EngineClient
from launch.serve.engine.handshake import hash_config, hash_files, make_name
from launch.serve.engine.keeper import SILENT_TIMES, EngineKeeper, EngineWatch, RestartLimit, is_watched
from launch.serve.engine.messages import Ready
from launch.serve.engine.standby import Standby
from trtrun import __version__
from trtrun.configuration.config import RuntimeConfig


@dataclass
class EngineEvents:
    """What an engine tells the server.

    Attributes:
        on_ready, on_lost: it is there; it is gone.
        on_hang: it is there, does not get on, and nothing starts it again; with a line for the user.
        on_recovery: it gets on again.
        on_restart: it is started again; with a line for the user.
        on_early_end: it was killed before it was up; the same.
        on_news: it is up again, and what the seconds went to, or the next one stands by; with a line for the user.
    """

    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    on_hang: Callable[[str], None]
    on_recovery: Callable[[], None]
    on_restart: Callable[[str], None]
    on_early_end: Callable[[str], None]
    on_news: Callable[[str], None]


def describe_return(seconds: float, ready: Ready) -> str:
    """That an engine is up again so many seconds after the end of the one before, and what these went to."""
    phases = ready.start_phases
    before = max(0.0, seconds - ready.start_seconds)
    meeting = max(0.0, ready.start_seconds - sum(phases.values()))
    named = {"until its ranks ran": before, "imports and meeting": meeting, **phases}
    return f"the engine is up again after {seconds:.1f} s: " + "; ".join(
        f"{name} {taken:.1f}" for name, taken in named.items()
    )


class RestartedEngine:
    """An engine from its start to its end, as the server has it; `own_engine` has the other one.

    Attributes:
        engine: for requests, the same over all restarts.
    """

    def __init__(self, config: RuntimeConfig, command: Sequence[str]) -> None:
        """Set the engine up; nothing is started yet.

        Args:
            config: of the ranks, and the limits of restarts.
            command: starts an engine which reads the same configuration (`engine_command`); `--socket NAME` is added.
        """
        self.engine = EngineClient()
        self._socket = make_name()
        self._command = [*command, "--socket", self._socket]
        self._limit = RestartLimit(config.server.max_restarts, config.server.restart_window_s)
        self._config = config
        self._files = hash_files(config)
        self._first: Ready | None = None
        self._change: str | None = None
        self._keeper: EngineKeeper | None = None
        self._ended_at: float | None = None
        launch, self._is_alone = config.launch, is_watched(config)
        silent = launch.heartbeat_seconds * (1 if self._is_alone else SILENT_TIMES)
        self._watch = EngineWatch(silent, launch.start_seconds if self._is_alone else None)

    async def keep(self, events: EngineEvents) -> int:
        """Start the engine and keep it until `close`, or until it cannot be kept.

        Returns:
            The exit status: of an engine that was told to end, or that could not start.

        Raises:
            FailedError: it ended, and is not started again.
        """

        def begin() -> None:
            keeper.note_up()
            events.on_ready()
            if self._ended_at is not None and self.engine.ready is not None:
                events.on_news(describe_return(time.monotonic() - self._ended_at, self.engine.ready))
            self._ended_at = None

        def lose() -> None:
            self._watch.forget()
            events.on_lost()
            keeper.note_silence()

        seconds = self._config.launch.heartbeat_seconds

        def end_silent() -> None:
            cause = (
                f"it stood by, and not all of it has heard of its turn within {seconds:g} s (launch.heartbeat_seconds)"
            )
            keeper.end_hung(cause, has_ranks=not self._is_alone)

        environment, standby = build_environment(), None
        if self._config.server.standby:
            standby = Standby(self._build_command, environment, events.on_news, seconds, end_silent)
        self._keeper = keeper = EngineKeeper(
            self._build_command,
            environment,
            self._may_restart,
            self._limit,
            events.on_restart,
            events.on_early_end,
            standby,
        )
        self.engine.accepts, self.engine.on_ready, self.engine.on_lost = self._is_same, begin, lose
        self.engine.on_faulty_request = self._limit.forgive
        await self.engine.listen(self._socket)
        watching = asyncio.create_task(self._watch_on(keeper))
        try:
            status = await keeper.keep()
        finally:
            watching.cancel()
        if self._change is not None:
            raise FailedError(f"{self._change}: start the server again")
        return status

    async def _watch_on(self, keeper: EngineKeeper) -> None:
        """End an engine that hangs."""
        self.engine.on_heartbeat = self._watch.hear
        while True:
            await asyncio.sleep(self._watch.interval)
            if (cause := self._watch.find_fault()) is not None:
                is_in_change = self._watch.late_phase == "adapters"
                keeper.end_hung(cause, has_ranks=not self._is_alone)
                self.engine.drop(
                    cause if is_in_change else None
                )  # from now on: the kernel may take its time with a process that waits for a device

    async def close(self) -> None:
        """Let the engine end; `keep` then returns."""
        if self._keeper is None:
            return
        if self.engine.ready is None:
            self._keeper.kill()  # it is only starting
        self.engine.close()
        await self._keeper.close()

    def kill(self) -> None:
        """End the engine now, as far as its processes do not end with this one."""
        if self._keeper is not None:
            self._keeper.kill()

    def is_abandoned(self) -> bool:
        """Whether a SIGTERM is none of a user's, but the end of whoever has started this process: never, for who has
        started a frontend may go."""
        return False

    def _may_restart(self) -> bool:
        """Whether the engine that has ended may be started again."""
        self._ended_at = self._ended_at or time.monotonic()  # one that ended at its start was never up
        self.engine.drop()
        number = self.engine.take_loss()
        if self._limit.allow(number):
            return True
        # The server ends where the engine is at fault, not where one request has ended it again and again.
        return self.engine.give_up_faulty_request([*self._limit.engines, number]) and self._limit.allow(number)

    def _build_command(self) -> list[str]:
        """The words that start the next engine: behind the first one with its room, however much memory is free, and
        with requests that wait for it."""
        if self._first is None:
            return self._command
        return [*self._command, "--awaited", "--set", f"kv_cache.max_tokens={self._config.kv_cache.max_tokens}"]

    def _is_same(self, ready: Ready) -> bool:
        """Whether an engine has read what the frontend has, and so goes on with the same texts."""
        self._change = self._find_change(ready)
        if self._change is not None:
            self.kill()
            return False
        if self._first is None:
            # A store of another size would end texts elsewhere, and refuse prompts that were let in.
            self._first = ready
            room = ready.scheduler_limits().num_stored_tokens
            cache = self._config.kv_cache.model_copy(update={"max_tokens": room})
            self._config = self._config.model_copy(update={"kv_cache": cache})
        return True

    def _find_change(self, ready: Ready) -> str | None:
        """What an engine has read otherwise than the frontend, or has otherwise than the first engine."""
        if ready.version != __version__:
            return f"trtrun was {__version__} when the server started, and the engine is {ready.version}"
        if ready.config_hash != hash_config(self._config):
            return "the configuration has changed while it was served, and the engine has read another one"
        known = self._files | (self._first.files if self._first is not None else {})
        changed = [name for name, found in known.items() if ready.files.get(name) != found]
        if changed:
            return f"the files of {' and '.join(changed)} have changed while they were served"
        before = self._first.limits if self._first is not None else ready.limits
        if ready.limits != before:
            names = [name for name in before if ready.limits.get(name) != before[name]]
            return f"the engine was started again with other limits ({', '.join(names)})"
        return None
