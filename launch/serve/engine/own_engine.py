"""An engine in this process: rank 0 of a job that a user's own mpirun or srun has started holds the front, too.

Nothing restarts it: the launcher ends the job with the first rank that it needs. It does not know HTTP.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count

from launch.exit_codes import ExitCode
from launch.mpi.drain import end_at_once
from launch.mpi.start_progress import StartProgress
from launch.serve.door.limits import server_ending
from launch.serve.door.refusals import Kind, Refusal
from launch.serve.engine import engines
from launch.serve.engine.engines import EngineEvents
from launch.serve.engine.messages import Ready, Status
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.engine.process import describe_engine, describe_round, read_status
from launch.serve.engine.watch import EngineWatch, is_watched
from launch.terminal import Bar
from trtrun.api.async_llm import AsyncLLM
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.errors import InvalidRequestError, RankFailedError
from trtrun.roles.draft_loss import losable_ranks
from trtrun.scheduling.limits import SchedulerLimits


class OwnEngine:
    """See `Engine` and `EngineRun`; it is both.

    Attributes:
        ready: what the engine says of itself; None before it is loaded, and once it is over.
        limits: the same.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.ready: Ready | None = None
        self.limits: SchedulerLimits | None = None
        self._config = config
        self._launcher = os.getppid()
        self._llm: AsyncLLM | None = None
        self._requests: dict[str, tuple[Inbox, asyncio.Task[None]]] = {}
        self._ids = count()
        self._over = asyncio.Event()
        self._failure: RankFailedError | None = None

    @property
    def engine(self) -> OwnEngine:
        """Itself."""
        return self

    async def keep(self, events: EngineEvents) -> int:
        """See `EngineRun`."""
        llm = await asyncio.to_thread(self._open)
        watching = asyncio.create_task(self._watch_on(llm, events))
        try:
            self._llm, self.ready = llm, await describe_engine(llm)
            self.limits = self.ready.scheduler_limits()
            events.on_ready()
            await self._over.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            watching.cancel()
            self.ready = self.limits = None
            events.on_lost()
            tasks = [task for _, task in self._requests.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(llm.close)
        return ExitCode.DONE

    async def close(self) -> None:
        """See `EngineRun`. Where the ranks are only starting, it ends this process, and the launcher ends them."""
        if self.ready is None and self._failure is None:
            end_at_once(signal.SIGTERM)
        self._over.set()

    def kill(self) -> None:
        """Nothing: the ranks end with this process."""

    def is_abandoned(self) -> bool:
        """Whether the launcher has died, which this process is told by SIGTERM."""
        return os.getppid() != self._launcher

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox, more_follow: bool = False) -> list[str]:
        """See `Engine`."""
        ids = [f"request {next(self._ids)}" for _ in requests]
        for number, (request_id, request) in enumerate(zip(ids, requests, strict=True)):
            task = asyncio.create_task(self._complete(request_id, number, request, inbox, ids[0]))
            self._requests[request_id] = (inbox, task)
        return ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests.pop(request_id)[1].cancel()

    def end_all(self, error: Refusal) -> None:
        """See `Engine`."""
        for inbox, _ in self._requests.values():
            inbox.end(error)
        self.abort(list(self._requests))

    async def ask_status(self) -> Status | None:
        """See `Engine`."""
        if self._llm is None or self.ready is None:
            return None
        try:
            return await asyncio.wait_for(self._llm.call(read_status), engines.STATUS_SECONDS)
        except (RankFailedError, InvalidRequestError, TimeoutError):
            return None

    def _open(self) -> AsyncLLM:
        with Bar("loading weights", in_bytes=True) as bar:
            llm = AsyncLLM.open(self._config, bar.update)
        assert llm is not None  # this is rank 0
        StartProgress().tell_expendable(losable_ranks(self._config, make_topology(self._config)))
        return llm

    async def _watch_on(self, llm: AsyncLLM, events: EngineEvents) -> None:
        """Tell of an engine that hangs, and of one that gets on again. Nothing starts it again."""
        if not is_watched(self._config):
            return
        launch = self._config.launch
        watch = EngineWatch(launch.heartbeat_seconds, launch.start_seconds)
        is_hanging = False
        while True:
            watch.hear(describe_round(llm))
            cause = watch.find_fault()
            if cause is not None and not is_hanging:
                events.on_hang(f"the engine hangs: {cause}")
            elif cause is None and is_hanging:
                events.on_recovery()
            is_hanging = cause is not None
            await asyncio.sleep(watch.beat)

    async def _complete(self, request_id: str, number: int, request: EngineRequest, inbox: Inbox, group: str) -> None:
        assert self._llm is not None
        deltas = self._llm.generate(request.prompt_token_ids, request.sampling, request_id, group=group)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    inbox.put(number, delta)
        except RankFailedError as error:
            self._failure = self._failure or error
            self._over.set()
            inbox.end(server_ending())
        except InvalidRequestError as error:
            inbox.end(Refusal(Kind.INVALID, str(error)))
        finally:
            self._requests.pop(request_id, None)
