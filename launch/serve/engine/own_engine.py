"""An engine in this process: rank 0 of a job that a user's own mpirun or srun has started holds the frontend, too.

Both sides speak as elsewhere, over a pair of sockets. Nothing restarts it: the launcher ends the job with the first
rank that it needs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from launch.exit_codes import ExitCode
from launch.jobs.mpi.drain import end_at_once
from launch.serve.admission.refusals import server_ending
from launch.serve.engine.client import EngineClient
from launch.serve.engine.keeper import EngineWatch, is_watched
from launch.serve.engine.process import open_engine, serve_frontend
from launch.serve.engine.restarted_engine import EngineEvents
from trtrun.api.async_llm import AsyncLLM
from trtrun.start.job_spec import JobSpec


class OwnEngine:
    """An engine in this process, with the interface of a `RestartedEngine`.

    Attributes:
        engine: for requests.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.engine = EngineClient()
        self._spec, self._config = spec, spec.config
        self._launcher = os.getppid()
        self._is_over = False

    async def keep(self, events: EngineEvents) -> int:
        """Load the engine, and let it serve the frontend until `close`.

        Raises:
            RankFailedError: a rank of it failed.
        """
        llm = await asyncio.to_thread(self._open)
        self.engine.on_ready, self.engine.on_lost = events.on_ready, events.on_lost
        watching = asyncio.create_task(self._watch_on(events))
        theirs, own = socket.socketpair()
        hearing = asyncio.create_task(self.engine.serve(*await asyncio.open_unix_connection(sock=theirs)))
        try:
            await serve_frontend(llm, own)
        finally:
            self._is_over = True
            watching.cancel()
            await hearing
            self.engine.end_all(server_ending())
            await asyncio.to_thread(llm.close)
        return ExitCode.DONE

    async def close(self) -> None:
        """Let the engine end. Where the ranks are only starting, it ends this process, and the launcher ends them."""
        if self.engine.ready is None and not self._is_over:
            end_at_once(signal.SIGTERM)
        self.engine.close()

    def kill(self) -> None:
        """Do nothing: the ranks end with this process."""

    def is_abandoned(self) -> bool:
        """Whether the launcher has died, which this process is told by SIGTERM."""
        return os.getppid() != self._launcher

    def _open(self) -> AsyncLLM:
        llm = open_engine(self._spec)
        assert llm is not None  # this is rank 0
        return llm

    async def _watch_on(self, events: EngineEvents) -> None:
        """Tell of an engine that hangs, and of one that gets on again. Nothing starts it again."""
        if not is_watched(self._config):
            return
        launch = self._config.launch
        watch = EngineWatch(launch.heartbeat_seconds, launch.start_seconds)
        self.engine.on_heartbeat = watch.hear
        is_hanging = False
        while True:
            await asyncio.sleep(watch.interval)
            cause = watch.find_fault()
            if cause is not None and not is_hanging:
                events.on_hang(f"the engine hangs: {cause}")
            elif cause is None and is_hanging:
                events.on_recovery()
            is_hanging = cause is not None
