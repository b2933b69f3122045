"""The engine's side of `trtrun serve`: the ranks of a job, and on rank 0 an AsyncLLM that serves one socket.

The frontend starts it as a child: alone where one slot does everything, else as the parent of mpirun, as in `trtrun
run`. Rank 0 loads the models and then calls the frontend. Texts are made here, because a stop string ends its row in
the round in which it is whole.
"""

from __future__ import annotations

import asyncio
import faulthandler
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from launch.exit_codes import ExitCode, FailedError
from launch.jobs.check.rank_check import check_before_run
from launch.jobs.mpi.job import finish_mpi
from launch.jobs.mpi.start_progress import STARTED, StartProgress
from launch.jobs.terminal import Bar
from launch.serve.engine.handshake import connect, hash_config, hash_files
from launch.serve.engine.keeper import find_late, is_watched
from launch.serve.engine.messages import (
    Abort,
    AdapterChanged,
    AskStatus,
    Begin,
    Close,
    DropAdapter,
    Generate,
    Heartbeat,
    LoadAdapter,
    MessageError,
    MessageStream,
    Ready,
    Standing,
    Status,
)
from launch.serve.engine.outbox import Outbox, Sending
from launch.serve.engine.standby import wait_for_turn
from parallel.watchdog.heartbeat_server import heartbeat_interval
from trtrun import __version__
from trtrun.api.async_llm import AsyncLLM
from trtrun.api.engine_thread import Arrival
from trtrun.api.llm_engine import LLMEngine
from trtrun.core.outputs import StartReport
from trtrun.errors import InvalidRequestError, RankFailedError, TrtrunError
from trtrun.garbage import leave_out_what_is
from trtrun.rounds.failures import losable_ranks
from trtrun.start.job_spec import JobSpec


async def describe_engine(llm: AsyncLLM, begun: float) -> Ready:
    """What an engine that is loaded says of itself, whose start has begun then."""
    # How many places layers with windows have changes no text: an engine that is started again may have another number.
    limits = await llm.call(lambda engine: asdict(replace(engine.scheduler.limits, windows=None, num_places=0)))
    others = {
        f"the models of rank {rank.rank} on {rank.host}": rank.files_hash for rank in llm.report.ranks if rank.rank
    }
    return Ready(
        version=__version__,
        config_hash=hash_config(llm.config),
        limits=limits,
        memory=_memory(llm.report),
        files=hash_files(llm.config) | others,
        start_seconds=time.monotonic() - begun,
        start_phases=llm.report.phase_seconds(),
    )


def describe_ranks(llm: AsyncLLM) -> Heartbeat:
    """Describe the states of the engine's threads, in any thread. Ranks of a job are watched by each other."""
    is_alone, limit = is_watched(llm.config), llm.config.launch.heartbeat_seconds
    standings = []
    for rank, doing in llm.engine.orchestrator.look().items():
        standings.append(
            Standing(
                rank=rank,
                phase=doing.phase.kind,
                doing=doing.words,
                seconds=doing.phase_seconds,
                still_seconds=doing.still_seconds,
                limit=limit if is_alone and doing.must_get_on else None,
            )
        )
        for work in doing.beside:
            standings.append(
                Standing(
                    rank=rank,
                    phase=work.kind,
                    doing=f"in {work.words}",
                    seconds=work.seconds,
                    still_seconds=work.still_seconds,
                    limit=work.limit if is_alone else None,
                )
            )
    return Heartbeat(standings=tuple(standings))


def read_status(engine: LLMEngine) -> Status:
    """How full an engine is. In its thread."""
    scheduler = engine.scheduler
    return Status(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_free_blocks=scheduler.num_free_blocks,
        num_blocks=scheduler.limits.num_blocks - 1,
        totals=engine.statistics(),
        num_prefilling=scheduler.num_running - scheduler.num_decoding,
        num_prefill_tokens=scheduler.num_prefill_tokens,
        num_preempted=scheduler.num_preempted,
    )


def play_engine(spec: JobSpec, socket_name: str, turn_name: str | None = None) -> int:
    """Play this rank's part: workers serve rank 0 until the job is over, rank 0 serves the frontend until that ends.

    Args:
        spec: of the job.
        socket_name: where the frontend listens.
        turn_name: where it says that it is this engine's turn; None where it is.

    Raises:
        TrtrunError: the ranks do not fit together, or a model cannot be loaded.
        RankFailedError: a rank failed.
        FailedError: the frontend cannot be reached.
    """
    check_before_run(spec, looks_at_devices=turn_name is None)
    begun = STARTED
    if turn_name is not None:
        wait_for_turn(turn_name, has_gpus=any(slot.device.startswith("cuda") for slot in spec.topology.slots))
        begun = time.monotonic()
    llm = open_engine(spec)
    if llm is not None:
        with llm:
            asyncio.run(_serve(llm, socket_name, begun))
    finish_mpi()
    return ExitCode.DONE


def open_engine(spec: JobSpec) -> AsyncLLM | None:
    """Load this rank's part, and tell the terminal of it; None on workers, once they have served to the end."""
    with Bar("loading weights", in_bytes=True, then="compiling kernels and trying rounds") as bar:
        llm = AsyncLLM.open(spec, bar.update)
    if llm is not None:
        StartProgress().tell_expendable(losable_ranks(spec.config, spec.topology))
        leave_out_what_is()
    return llm


async def _serve(llm: AsyncLLM, socket_name: str, begun: float) -> None:
    try:
        connection = connect(socket_name)
    except OSError as error:
        raise FailedError(f"the front cannot be reached at {socket_name}: {error.strerror}") from None
    await serve_frontend(llm, connection, begun)


async def serve_frontend(llm: AsyncLLM, connection: socket.socket, begun: float = STARTED) -> None:
    """Greet the frontend and do what it says, until it closes or is gone. The engine's start has begun then, by
    time.monotonic().

    Raises:
        RankFailedError: a rank failed.
    """
    connection.setblocking(False)
    # The transport that reads owns its file descriptor; the engine's thread writes through one of its own.
    outbox = Outbox(connection.dup(), asyncio.get_running_loop())
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        await _Served(llm, outbox, begun).follow(MessageStream(reader))
    finally:
        outbox.close()
        writer.close()


class _Served:
    """Serves one frontend's requests. The engine's thread itself sends what comes of them."""

    def __init__(self, llm: AsyncLLM, outbox: Outbox, begun: float = STARTED) -> None:
        self._llm, self._begun = llm, begun
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._telling: set[asyncio.Task[None]] = set()
        self._changes: asyncio.Queue[LoadAdapter | DropAdapter | Generate] = asyncio.Queue()
        self._changing: Counter[str] = Counter()
        self._held: set[str] = set()

    async def follow(self, messages: MessageStream) -> None:
        """Serve the frontend's messages until it ends; see `serve_frontend`."""
        self._outbox.send(await describe_engine(self._llm, self._begun))
        reading = asyncio.create_task(self._read(messages))
        changing = asyncio.create_task(self._change_adapters())
        self._telling.add(asyncio.create_task(self._send_heartbeats()))
        try:
            await asyncio.wait((reading, changing, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            (changing if changing.done() else reading).result()
        finally:
            tasks = (reading, changing, *self._telling)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: MessageStream) -> None:
        async for message in messages:
            match message:
                case Begin():
                    self._begin(message.requests)
                case Abort():
                    self._held.discard(message.request_id)
                    self._llm.abort(message.request_id)
                case AskStatus():
                    # The engine answers between two rounds; what comes behind the question does not wait for that.
                    telling = asyncio.create_task(self._tell_status())
                    self._telling.add(telling)
                    telling.add_done_callback(self._telling.discard)
                case LoadAdapter() | DropAdapter():
                    self._changing[message.lora_name] += 1
                    self._changes.put_nowait(message)
                case Close():
                    return
                case _:
                    raise MessageError(f"the front sent a message that is the engine's: {type(message).__name__}")

    async def _change_adapters(self) -> None:
        """Load and drop adapters, one after the other and beside the rounds, and tell what came of each; requests that
        were sent behind a change of the adapter that they name begin behind it."""
        while True:
            change = await self._changes.get()
            if isinstance(change, Generate):
                if change.request_id in self._held:
                    self._held.discard(change.request_id)
                    self._deliver([change])
                continue
            error = await (self._load(change) if isinstance(change, LoadAdapter) else self._drop(change))
            if isinstance(error, RankFailedError):
                self._fail(error)
                return
            self._outbox.send(AdapterChanged(error=None if error is None else str(error)))
            self._changing[change.lora_name] -= 1

    async def _load(self, change: LoadAdapter) -> TrtrunError | None:
        """Load an adapter. Returns why it cannot be loaded; None once requests may name it."""
        ended: asyncio.Future[TrtrunError | None] = self._loop.create_future()

        def tell(error: TrtrunError | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def end(error: TrtrunError | None) -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(tell, error)

        try:
            await self._llm.call(lambda engine: engine.begin_adapter(change.lora_name, Path(change.path), end))
        except TrtrunError as error:
            return error
        return await ended

    async def _drop(self, change: DropAdapter) -> TrtrunError | None:
        try:
            await self._llm.call(lambda engine: engine.drop_adapter(change.lora_name))
        except TrtrunError as error:
            return error
        return None

    async def _send_heartbeats(self) -> None:
        limit = self._llm.config.launch.heartbeat_seconds
        was_hanging = False
        while True:
            heartbeat = describe_ranks(self._llm)
            is_hanging = find_late(heartbeat) is not None
            if is_hanging and not was_hanging:
                faulthandler.dump_traceback()  # before the frontend hears it, and may end this process
            was_hanging = is_hanging
            self._outbox.offer(heartbeat)
            await asyncio.sleep(heartbeat_interval(limit))

    async def _tell_status(self) -> None:
        try:
            self._outbox.send(await self._llm.call(read_status))
        except RankFailedError as error:
            self._fail(error)
        except InvalidRequestError:
            pass  # it is closed

    def _begin(self, requests: Sequence[Generate]) -> None:
        """Begin requests; one that names an adapter which is being changed waits for that, and no other does."""
        beginning = []
        for request in requests:
            name = request.sampling.get("lora_name")
            if name is not None and self._changing[name]:
                self._held.add(request.request_id)
                self._changes.put_nowait(request)
            else:
                beginning.append(request)
        self._deliver(beginning)

    def _deliver(self, requests: Sequence[Generate]) -> None:
        """The frontend has checked them; their bad words become tokens, and their guides grammars, here, beside the
        rounds."""
        arrivals = []
        for request in requests:
            sampling = request.sampling_params()
            recipient = Sending(self._outbox, request.request_id, self._hear_failure)
            if sampling.bad_words or sampling.guided:
                with suppress(InvalidRequestError):  # told when it is added
                    self._llm.engine.prepare(sampling)
            tokens, request_id = request.prompt_token_ids, request.request_id
            turns = request.group, request.owner
            arrivals.append(Arrival(recipient, request_id, tokens, sampling, request.generated, *turns))
        if arrivals:
            self._llm.deliver(arrivals)

    def _hear_failure(self, error: RankFailedError) -> None:
        """Pass a failure on to the event loop; called in the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: another request's failure has ended it
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: RankFailedError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


def _memory(report: StartReport) -> dict[str, int]:
    """Bytes that all ranks hold, by kind of device."""
    found = {"cpu": 0, "gpu": 0}
    for rank in report.ranks:
        kind = "gpu" if rank.device.startswith("cuda") else "cpu"
        found[kind] += rank.shard_bytes + rank.working_bytes + rank.kv_bytes
    return found
