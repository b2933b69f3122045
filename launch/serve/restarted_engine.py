"""An engine in processes of its own, which is started again when it ends: keeper, socket and client joined.

It knows that an engine goes on with the requests of the one before it only if it has read the same configuration. It
does not know requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from launch.exit_codes import FailedError
from launch.mpi.mpirun import build_environment
from launch.serve.engine_client import EngineClient
from launch.serve.engine_keeper import EngineKeeper, RestartLimit
from launch.serve.engine_process import hash_config
from launch.serve.engine_socket import make_name
from launch.serve.engine_watch import EngineWatch, is_watched
from launch.serve.engines import EngineEvents
from launch.serve.messages import Ready
from trtrun import __version__
from trtrun.config import RuntimeConfig


class RestartedEngine:
    """See `EngineRun`.

    Attributes:
        engine: for requests.
    """

    def __init__(self, config: RuntimeConfig, command: Sequence[str]) -> None:
        """Nothing is started yet.

        Args:
            config: of the ranks, and the limits of restarts.
            command: starts an engine which reads the same configuration (`engine_command`); `--socket NAME` is added.
        """
        self.engine = EngineClient()
        self._socket = make_name()
        self._command = [*command, "--socket", self._socket]
        self._limit = RestartLimit(config.server.max_restarts, config.server.restart_window_s)
        self._config_hash = hash_config(config)
        self._has_changed = False
        self._keeper: EngineKeeper | None = None
        launch = config.launch
        self._watch = EngineWatch(launch.heartbeat_seconds, launch.start_seconds) if is_watched(config) else None

    async def keep(self, events: EngineEvents) -> int:
        """See `EngineRun`."""

        def restart(line: str) -> None:
            self.engine.drop()
            events.on_restart(line)

        def begin() -> None:
            keeper.note_up()
            events.on_ready()

        def lose() -> None:
            if self._watch is not None:
                self._watch.forget()
            events.on_lost()
            keeper.note_silence()

        self._keeper = keeper = EngineKeeper(
            self._command, build_environment(), self._limit, restart, events.on_early_end
        )
        self.engine.accepts, self.engine.on_ready, self.engine.on_lost = self._is_same, begin, lose
        await self.engine.listen(self._socket)
        watching = asyncio.create_task(self._watch_on(keeper))
        try:
            status = await keeper.keep()
        finally:
            watching.cancel()
        if self._has_changed:
            raise FailedError(
                "the configuration has changed while it was served, and the engine was started again with another one: "
                "start the server again"
            )
        return status

    async def _watch_on(self, keeper: EngineKeeper) -> None:
        """End an engine that hangs."""
        if self._watch is None:
            return
        self.engine.on_beat = self._watch.hear
        while True:
            await asyncio.sleep(self._watch.beat)
            if (cause := self._watch.find_fault()) is not None:
                keeper.end_hung(cause)
                self.engine.drop()  # from now on: the kernel may take its time with a process that waits for a device

    async def close(self) -> None:
        """See `EngineRun`."""
        if self._keeper is None:
            return
        if self.engine.ready is None:
            self._keeper.kill()  # it is only starting
        self.engine.close()
        await self._keeper.close()

    def kill(self) -> None:
        """See `EngineRun`."""
        if self._keeper is not None:
            self._keeper.kill()

    def is_abandoned(self) -> bool:
        """Never: who has started a front may go."""
        return False

    def _is_same(self, ready: Ready) -> bool:
        """Whether an engine has read what the front has, and so goes on with the same texts."""
        self._has_changed = ready.config_hash != self._config_hash or ready.version != __version__
        if self._has_changed:
            self.kill()
        return not self._has_changed
