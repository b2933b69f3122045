"""The engine's side of `trtrun serve`: the ranks of a job, and on rank 0 an AsyncLLM that serves one socket.

The front starts it as a child: alone where one slot does everything, else as the parent of mpirun, as in `trtrun run`.
Rank 0 loads the models and then calls the front. Texts are made here, because a stop string ends its row in the round
in which it is whole. It does not know HTTP, prompts as text, or who reads what it sends.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from launch.check.rank_check import check_before_run
from launch.exit_codes import ExitCode, FailedError
from launch.mpi.job import finish_mpi
from launch.mpi.start_progress import StartProgress
from launch.serve.messages import (
    Abort,
    AskStatus,
    Close,
    Delta,
    Ended,
    Generate,
    Message,
    MessageError,
    Ready,
    Status,
    encode,
    read_message,
)
from launch.terminal import Bar
from trtrun import __version__
from trtrun.async_llm import AsyncLLM
from trtrun.config import RuntimeConfig
from trtrun.errors import InvalidRequestError, RankFailedError
from trtrun.llm_engine import LLMEngine
from trtrun.roles.draft_loss import losable_ranks
from trtrun.topology import make_topology


def hash_config(config: RuntimeConfig) -> str:
    """Tells whether front and engine, or an engine and the one before it, have read the same."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def play_engine(config: RuntimeConfig, socket: Path) -> int:
    """This rank's part: workers serve rank 0 until the job is over, rank 0 serves the front until that ends.

    Raises:
        TrtrunError: the ranks do not fit together, or a model cannot be loaded.
        RankFailedError: a rank failed.
        FailedError: the front cannot be reached.
    """
    check_before_run(config)
    with Bar("loading weights", in_bytes=True) as bar:
        llm = AsyncLLM.open(config, bar.update)
    if llm is None:
        finish_mpi()
        return ExitCode.DONE
    StartProgress().tell_expendable(losable_ranks(config, make_topology(config)))
    with llm:
        asyncio.run(_serve(llm, socket))
    finish_mpi()
    return ExitCode.DONE


async def _serve(llm: AsyncLLM, socket: Path) -> None:
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except OSError as error:
        raise FailedError(f"the front cannot be reached at {socket}: {error.strerror}") from None
    served = _Served(llm, writer)
    try:
        await served.follow(reader)
    finally:
        writer.close()


class _Served:
    """One front's requests: each has a task that sends what comes of it."""

    def __init__(self, llm: AsyncLLM, writer: asyncio.StreamWriter) -> None:
        self._llm = llm
        self._writer = writer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Greet the front and do what it says, until it closes or is gone.

        Raises:
            RankFailedError: a rank failed.
        """
        limits = await self._llm.call(lambda engine: asdict(engine.scheduler.limits))
        self._send(Ready(version=__version__, config_hash=hash_config(self._llm.config), limits=limits))
        reading = asyncio.create_task(self._read(reader))
        try:
            await asyncio.wait((reading, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            reading.result()
        finally:
            reading.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader)) is not None:
            match message:
                case Generate():
                    self._tasks[message.request_id] = asyncio.create_task(self._complete(message))
                case Abort():
                    if (task := self._tasks.pop(message.request_id, None)) is not None:
                        task.cancel()
                case AskStatus():
                    self._send(await self._llm.call(_status))
                case Close():
                    return
                case _:
                    raise MessageError(f"the front sent a message that is the engine's: {message.kind}")

    async def _complete(self, request: Generate) -> None:
        """Send what comes of one request. Where the front does not read, deltas wait in the AsyncLLM and become one."""
        try:
            deltas = self._llm.generate(
                request.prompt_token_ids,
                request.sampling_params(),
                request.request_id,
                request.generated,
                request.group,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    self._send(Delta.of(delta))
                    await self._writer.drain()
        except RankFailedError as error:
            if not self._failed.done():
                self._failed.set_exception(error)
        except InvalidRequestError as error:
            self._send(Ended(request_id=request.request_id, error=str(error)))
        except ConnectionError:
            return  # the front is gone, which the reader hears, too
        finally:
            if self._tasks.get(request.request_id) is asyncio.current_task():
                del self._tasks[request.request_id]

    def _send(self, message: Message) -> None:
        self._writer.write(encode(message))


def _status(engine: LLMEngine) -> Status:
    scheduler = engine.scheduler
    return Status(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_free_blocks=scheduler.num_free_blocks,
        num_blocks=scheduler.limits.num_blocks - 1,
        totals=engine.statistics(),
    )
