"""The engine's side of `trtrun serve`: the ranks of a job, and on rank 0 an AsyncLLM that serves one socket.

The front starts it as a child: alone where one slot does everything, else as the parent of mpirun, as in `trtrun run`.
Rank 0 loads the models and then calls the front. Texts are made here, because a stop string ends its row in the round
in which it is whole. It does not know HTTP, prompts as text, or who reads what it sends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from launch.check.rank_check import check_before_run
from launch.exit_codes import ExitCode, FailedError
from launch.mpi.job import finish_mpi
from launch.mpi.start_progress import StartProgress
from launch.serve.engine.identity import hash_config, hash_files
from launch.serve.engine.keeper import is_watched
from launch.serve.engine.messages import (
    Abort,
    AdapterChanged,
    AskStatus,
    Beat,
    Begin,
    Close,
    DropAdapter,
    Generate,
    LoadAdapter,
    MessageError,
    MessageStream,
    Ready,
    Status,
)
from launch.serve.engine.outbox import Outbox, Sending
from launch.serve.engine.unix_socket import connect
from launch.terminal import Bar
from parallel.watchdog.heartbeat_server import beat_seconds
from trtrun import __version__
from trtrun.api.async_llm import AsyncLLM
from trtrun.api.engine_thread import Arrival
from trtrun.api.llm_engine import LLMEngine
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.core.outputs import StartReport
from trtrun.errors import CheckpointError, InvalidRequestError, RankFailedError
from trtrun.garbage import leave_out_what_is
from trtrun.roles.draft_loss import losable_ranks


async def describe_engine(llm: AsyncLLM) -> Ready:
    """What an engine that is loaded says of itself."""
    limits = await llm.call(lambda engine: asdict(engine.scheduler.limits))
    others = {
        f"the models of rank {rank.rank} on {rank.host}": rank.files_hash for rank in llm.report.ranks if rank.rank
    }
    return Ready(
        version=__version__,
        config_hash=hash_config(llm.config),
        limits=limits,
        memory=_memory(llm.report),
        files=hash_files(llm.config) | others,
    )


def describe_round(llm: AsyncLLM) -> Beat:
    """What the engine is doing. In any thread."""
    doing = llm.engine.orchestrator.look()
    return Beat(doing=doing.words, still_seconds=doing.still_seconds if doing.phase.is_in_round else None)


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


def play_engine(config: RuntimeConfig, socket_name: str) -> int:
    """This rank's part: workers serve rank 0 until the job is over, rank 0 serves the front until that ends.

    Raises:
        TrtrunError: the ranks do not fit together, or a model cannot be loaded.
        RankFailedError: a rank failed.
        FailedError: the front cannot be reached.
    """
    check_before_run(config)
    llm = open_engine(config)
    if llm is not None:
        with llm:
            asyncio.run(_serve(llm, socket_name))
    finish_mpi()
    return ExitCode.DONE


def open_engine(config: RuntimeConfig) -> AsyncLLM | None:
    """Load this rank's part, and tell the terminal of it; None on workers, once they have served to the end."""
    with Bar("loading weights", in_bytes=True, then="compiling kernels and trying rounds") as bar:
        llm = AsyncLLM.open(config, bar.update)
    if llm is not None:
        StartProgress().tell_expendable(losable_ranks(config, make_topology(config)))
        leave_out_what_is()
    return llm


async def _serve(llm: AsyncLLM, socket_name: str) -> None:
    try:
        connection = connect(socket_name)
    except OSError as error:
        raise FailedError(f"the front cannot be reached at {socket_name}: {error.strerror}") from None
    await serve_front(llm, connection)


async def serve_front(llm: AsyncLLM, connection: socket.socket) -> None:
    """Greet the front and do what it says, until it closes or is gone.

    Raises:
        RankFailedError: a rank failed.
    """
    connection.setblocking(False)
    # The transport that reads owns its file descriptor; the engine's thread writes through one of its own.
    outbox = Outbox(connection.dup(), asyncio.get_running_loop())
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        await _Served(llm, outbox).follow(MessageStream(reader))
    finally:
        outbox.close()
        writer.close()


class _Served:
    """One front's requests. What comes of them, the engine's thread sends itself."""

    def __init__(self, llm: AsyncLLM, outbox: Outbox) -> None:
        self._llm = llm
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._telling: set[asyncio.Task[None]] = set()

    async def follow(self, messages: MessageStream) -> None:
        """See `serve_front`."""
        self._outbox.send(await describe_engine(self._llm))
        reading = asyncio.create_task(self._read(messages))
        if is_watched(self._llm.config):
            self._telling.add(asyncio.create_task(self._beat()))
        try:
            await asyncio.wait((reading, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            reading.result()
        finally:
            tasks = (reading, *self._telling)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: MessageStream) -> None:
        async for message in messages:
            match message:
                case Begin():
                    self._begin(message.requests)
                case Abort():
                    self._llm.abort(message.request_id)
                case AskStatus():
                    # The engine answers between two rounds; what comes behind the question does not wait for that.
                    telling = asyncio.create_task(self._tell_status())
                    self._telling.add(telling)
                    telling.add_done_callback(self._telling.discard)
                case LoadAdapter() | DropAdapter():
                    await self._change_adapters(message)  # requests behind it may ask for it
                case Close():
                    return
                case _:
                    raise MessageError(f"the front sent a message that is the engine's: {type(message).__name__}")

    async def _change_adapters(self, change: LoadAdapter | DropAdapter) -> None:
        """Load or drop an adapter between two rounds, and tell what came of it."""

        def work(engine: LLMEngine) -> None:
            if isinstance(change, LoadAdapter):
                engine.load_adapter(change.lora_name, Path(change.path))
            else:
                engine.adapters.drop(change.lora_name)

        error = None
        try:
            await self._llm.call(work)
        except RankFailedError as failure:
            self._fail(failure)
            return
        except (CheckpointError, InvalidRequestError) as problem:
            error = str(problem)
        self._outbox.send(AdapterChanged(error=error))

    async def _beat(self) -> None:
        limit = self._llm.config.launch.heartbeat_seconds
        was_hanging = False
        while True:
            beat = describe_round(self._llm)
            is_hanging = beat.still_seconds is not None and beat.still_seconds > limit
            if is_hanging and not was_hanging:
                faulthandler.dump_traceback()  # before the front hears it, and may end this process
            was_hanging = is_hanging
            self._outbox.offer(beat)
            await asyncio.sleep(beat_seconds(limit))

    async def _tell_status(self) -> None:
        try:
            self._outbox.send(await self._llm.call(read_status))
        except RankFailedError as error:
            self._fail(error)
        except InvalidRequestError:
            pass  # it is closed

    def _begin(self, requests: Sequence[Generate]) -> None:
        """The front has checked them; their bad words become tokens, and their guides grammars, here, beside the
        rounds."""
        arrivals = []
        for request in requests:
            sampling = request.sampling_params()
            recipient = Sending(self._outbox, request.request_id, self._hear_failure)
            if sampling.bad_words or sampling.guided:
                with suppress(InvalidRequestError):  # told when it is added
                    self._llm.engine.prepare(sampling)
            arrivals.append(
                Arrival(
                    recipient, request.request_id, request.prompt_token_ids, sampling, request.generated, request.group
                )
            )
        self._llm.deliver(arrivals)

    def _hear_failure(self, error: RankFailedError) -> None:
        """In the engine's thread."""
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
