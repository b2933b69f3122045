"""`trtrun serve`: the frontend's process from its start to its end.

It listens, starts the engine, says where it listens once the engine is there, and drains on a signal. What requests go
through is `frontend`'s and its protocols' business; where the engine runs, and whether it is started again, is that of
`restarted_engine` or `own_engine`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from launch.exit_codes import ExitCode
from launch.jobs.batch.reach import describe_way
from launch.jobs.logs import FILE_ONLY
from launch.jobs.mpi.drain import Drain, end_at_once, end_signals
from launch.jobs.mpi.job import finish_mpi, is_reporting_rank
from launch.serve.admission.event_loop_stalls import MeasuredLoop
from launch.serve.admission.refusals import server_ending
from launch.serve.api.kserve.grpc_server import GrpcServer
from launch.serve.application.addresses import Addresses, ended_without_files
from launch.serve.application.http_server import HttpServer, make_application, make_metrics_application
from launch.serve.application.parts import make_parts
from launch.serve.engine.client import EngineClient
from launch.serve.engine.restarted_engine import EngineEvents, RestartedEngine
from launch.serve.frontend.coalescing import bound_threads
from launch.serve.handover.handover import Handover
from launch.serve.handover.name_file import describe_server
from launch.serve.http.connections import allow_open_files
from launch.serve.http.requests import Keys
from launch.serve.http.tls import check_tls
from trtrun.configuration.drafting.speculation_section import SpeculationSection, SuffixOptions
from trtrun.configuration.drafting.text_methods import TokenRecyclingSection
from trtrun.garbage import leave_out_what_is
from trtrun.loading.model_settings import describe_generation_defaults
from trtrun.start.job_spec import JobSpec

METRICS_CONNECTIONS = 64
"""Connections that may be open on the metrics port."""

ERROR_SECONDS = 1.0
"""Seconds for the last words to streams that are cut off."""

if TYPE_CHECKING:  # the frontend of an engine in processes of its own does without torch
    from launch.serve.engine.own_engine import OwnEngine

logger = logging.getLogger(__name__)


def play_serve(spec: JobSpec, running: RestartedEngine | OwnEngine) -> int:
    """Serve until a signal ends it.

    Args:
        spec: checked, with all that command line options say.
        running: the engine, not yet started.

    Returns:
        The exit status: done when every request had its answer, drained where some were cut off, the engine's own where
        it could not start.

    Raises:
        ConfigError: it cannot listen, or a file of keys or certificates is wrong.
        FailedError: the engine ended too often.
        RankFailedError: a rank failed, and nothing starts it again.
    """
    section = spec.config.server
    check_tls(section)
    keys = Keys.read(section.api_key_file)
    allow_open_files(section.max_connections)
    bound_threads()
    addresses = Addresses.open(section, os.environ)
    if addresses.are_open and not keys.are_needed:
        say(
            f"WARNING: {section.host} is reached from other hosts, and no API key is asked for: set server.api_key_file"
        )
    if keys.have_several and (told := _what_keys_share(spec.config.speculation)):
        say(f"WARNING: {told}")
    # uvloop's loop takes half the time of asyncio's own for what streams do most: write to a socket.
    with addresses, ended_without_files(addresses), asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        return runner.run(_serve(spec, keys, running, addresses))


def _what_keys_share(section: SpeculationSection) -> str | None:
    """What requests with one API key show to those with another, and what to do about it; None where nothing is."""
    if isinstance(section, SuffixOptions) and section.suffix_decoding_max_cached_requests:
        return (
            "answers to one API key are looked up for the others, who may tell by their speed what these were like: "
            "leave speculation.suffix_decoding_max_cached_requests out unless all keys may"
        )
    if isinstance(section, TokenRecyclingSection):
        return (
            "what the target held likely for one API key is drafted for the others, who may tell by their speed what "
            "its texts were like: take another speculation.method than token_recycling unless all keys may"
        )
    return None


def play_serve_rank(spec: JobSpec) -> int:
    """The part of a rank that a user's own launcher has started: rank 0 serves, and the others compute for it.

    Raises:
        TrtrunError: as of `play_serve`; the ranks do not fit together, or a model cannot be loaded.
        RankFailedError: a rank failed.
    """
    # As above.
    from launch.jobs.check.rank_check import check_before_run
    from launch.serve.engine.own_engine import OwnEngine
    from trtrun.api.async_llm import AsyncLLM

    with Drain().listening() if not is_reporting_rank() else nullcontext():
        check_before_run(spec)
        if is_reporting_rank():
            status = play_serve(spec, OwnEngine(spec))
        else:
            AsyncLLM.open(spec)
            status = ExitCode.DONE
    finish_mpi()
    return status


def say(line: str) -> None:
    """Tell the user a line, which the frontend's log file has, too."""
    logger.info("%s", line, extra=FILE_ONLY)
    with suppress(OSError):
        print(f"trtrun: {line}", file=sys.stderr, flush=True)


async def _serve(spec: JobSpec, keys: Keys, running: RestartedEngine | OwnEngine, addresses: Addresses) -> int:
    return await _Server(spec, keys, running, addresses).run()


class _Server:
    """The parts of a server, joined, and its states: starting, serving, draining, over."""

    def __init__(self, spec: JobSpec, keys: Keys, running: RestartedEngine | OwnEngine, addresses: Addresses) -> None:
        self._config = spec.config
        self._addresses = addresses
        self._running = running
        parts = make_parts(spec, keys, running.engine)
        self._frontend, self._parsers = parts.frontend, parts.parsers
        self._admission, self._metrics = self._frontend.admission, self._frontend.metrics
        self._routes, self._servicer = parts.routes, parts.servicer
        self._sampling = parts.sampling
        self._handover = Handover(spec.config, running.engine, self._admission, self._use, say)
        self._batches = parts.batches
        self._is_ready = asyncio.Event()
        self._stopped_by: int | None = None
        self._is_asked = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal, or the engine's end."""
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._hear, number)
        grpc, servers = self._make_servers()
        self._parsers.start()
        if self._batches is not None:
            self._batches.start()
        serving = asyncio.gather(*(server.run_here() for server in servers))
        events = EngineEvents(
            on_ready=self._engine_is_there,
            on_lost=self._engine_is_gone,
            on_hang=self._engine_hangs,
            on_recovery=self._engine_has_recovered,
            on_restart=self._engine_is_restarted,
            on_early_end=say,
            on_news=say,
        )
        keeping = asyncio.create_task(self._running.keep(events))
        waiting = asyncio.create_task(self._is_ready.wait())
        asked = asyncio.create_task(self._is_asked.wait())
        try:
            await asyncio.wait((serving, keeping, waiting, asked), return_when=asyncio.FIRST_COMPLETED)
            if self._is_ready.is_set():
                self._begin_to_measure(loop)
                await self._take_name(grpc.port)
                await asyncio.wait((serving, keeping, asked), return_when=asyncio.FIRST_COMPLETED)
            is_whole = await self._drain(keeping) if asked.done() and not keeping.done() else True
            return await self._end(keeping, is_whole)
        finally:
            await self._leave_batches()
            await self._handover.close()
            self._end_all()
            self._parsers.close()  # requests that are being read are told so, too
            self._addresses.remove_files()
            for server in servers:
                server.finish()
            _, late = await asyncio.wait((serving,), timeout=ERROR_SECONDS)
            for server in servers:
                server.cut()
            if late:
                serving.cancel()
            waiting.cancel()
            asked.cancel()
            await asyncio.gather(serving, waiting, asked, return_exceptions=True)

    def _make_servers(self) -> tuple[GrpcServer, tuple[HttpServer | GrpcServer, ...]]:
        """The server of gRPC, and all of them."""
        section, addresses = self._config.server, self._addresses
        application = make_application(self._frontend, self._routes, section.allowed_origins)
        grpc = GrpcServer(self._servicer, section, self._frontend.metrics, addresses.grpc_path)
        if addresses.grpc_path is not None:
            addresses.note_file(addresses.grpc_path)
        answering = HttpServer(application, addresses.http, section, section.max_connections)
        if addresses.metrics is None:
            return grpc, (answering, grpc)
        told = make_metrics_application(self._frontend)
        return grpc, (answering, grpc, HttpServer(told, addresses.metrics, section, METRICS_CONNECTIONS))

    def _begin_to_measure(self, loop: asyncio.AbstractEventLoop) -> None:
        """The start is over: from here on the loop's stretches count."""
        leave_out_what_is()  # streams wait for whatever holds up this process
        if isinstance(loop, MeasuredLoop):
            loop.stalls.begin()
            self._metrics.ask_longest_stall(lambda: loop.stalls.longest)

    async def _take_name(self, grpc_port: int) -> None:
        """Say where this server is, and that it is the one of its name."""
        addresses, model = self._addresses, self._frontend.model_name
        for line in addresses.describe(model, grpc_port, os.environ):
            say(line)
        if self._sampling:
            say(describe_generation_defaults(self._sampling))
        way = describe_way(addresses.url, not addresses.are_open, os.environ)
        name = describe_server(model, addresses.url, way, not addresses.are_open, os.environ)
        await self._handover.take_name(name, not addresses.are_open)

    async def _drain(self, keeping: asyncio.Task[int]) -> bool:
        """Let requests in work finish within the time that they have, or until no engine will come; whether all did."""
        assert self._stopped_by is not None
        self._admission.is_closing = True
        await self._leave_batches()
        seconds = self._config.launch.drain_seconds
        self._handover.end()
        if self._admission.num_requests:
            name = signal.Signals(self._stopped_by).name
            say(
                f"{name}: no more requests are let in, the {self._admission.num_requests} in work have {seconds:g} s; "
                "a second SIGINT or SIGTERM ends at once"
            )
        emptying = asyncio.create_task(self._admission.wait_empty(seconds))
        await asyncio.wait((emptying, keeping), return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            emptying.cancel()
            return False
        return await emptying

    async def _leave_batches(self) -> None:
        """Leave the rows of batches that are in work to the server that is started next."""
        if self._batches is not None:
            await self._batches.close()

    async def _end(self, keeping: asyncio.Task[int], is_whole: bool) -> int:
        """End the engine, or take note of its end."""
        if keeping.done():
            self._admission.is_closing = True
            return keeping.result()
        self._end_all()
        await self._running.close()
        await keeping
        if not is_whole:
            say("drained: the requests that were left have ended with an error")
        return ExitCode.DONE if is_whole else ExitCode.DRAINED

    def _end_all(self) -> None:
        """End every request, wherever it goes on, with an error that says where to go."""
        for client in (self._handover.client, self._running.engine):
            client.end_all(server_ending(self._admission.successor))

    def _use(self, client: EngineClient) -> None:
        """New requests go to this engine: the own one, or the server that follows."""
        self._frontend.client = client
        self._admission.is_open = client.ready is not None

    def _hear(self, number: int) -> None:
        """The first signal drains; a SIGINT or SIGTERM after it ends."""
        if self._running.is_abandoned():
            self._addresses.remove_files()
            end_at_once(number)
        if self._stopped_by is not None:
            if number in (signal.SIGUSR1, signal.SIGHUP):
                return
            self._running.kill()
            self._addresses.remove_files()
            end_at_once(number)
        self._stopped_by = number
        self._is_asked.set()

    def _engine_is_there(self) -> None:
        self._admission.is_open = True
        self._handover.note_ready()
        self._is_ready.set()

    def _engine_is_gone(self) -> None:
        self._admission.is_open = self._handover.hand_over()
        self._admission.is_hanging = False
        self._metrics.count_loss()

    def _engine_hangs(self, line: str) -> None:
        self._admission.is_hanging = True
        say(line)

    def _engine_has_recovered(self) -> None:
        self._admission.is_hanging = False
        say("the engine gets on again")

    def _engine_is_restarted(self, line: str) -> None:
        self._metrics.count_restart()
        say(line)
