"""The Python API for programs with an event loop, such as a server: prompts in, deltas out as rounds commit them.

    llm = AsyncLLM.open(load_config("run.yaml"))     # on every rank; None on worker ranks, once they have served
    async for delta in llm.generate("def main(", SamplingParams(max_tokens=64)):
        print(delta.text, end="")

The engine core is opened, stepped and closed by a thread of its own (`engine_thread`): a round must not wait for an
event loop, nor the loop for a round. Readers never slow the rounds: what a reader has not taken yet is kept for it, a
delta a round, which is never more than the tokens that it asked for, and comes as one delta.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from parallel.mpi_rank import find_mpi_rank
from trtrun.api.engine_thread import Arrival, EngineThread, Outlet, Recipient
from trtrun.api.llm_engine import LLMEngine
from trtrun.api.prompts import Prompt
from trtrun.configuration.config import RuntimeConfig
from trtrun.core.outputs import CompletionDelta, RequestId, StartReport, merge_deltas
from trtrun.core.sampling_params import SamplingParams
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import Tokenizer

T = TypeVar("T")


class AsyncLLM:
    """A target model, optionally with a draft model, whose completions are read from event loops. Made by `open`.

    Attributes:
        engine: the engine core. Only its thread may change it; `call` does something there.
        config: what it was made from.
        report: what each rank holds.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
    """

    def __init__(self, thread: EngineThread, engine: LLMEngine) -> None:
        self.engine = engine
        self.config: RuntimeConfig = engine.config
        self.report: StartReport = engine.report
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self._thread = thread
        self._numbers = count()
        # As of `LLM`: a program that forgets to close must not leave the other ranks waiting.
        self._finalizer = weakref.finalize(self, thread.close)

    @classmethod
    def open(
        cls, config: RuntimeConfig | JobSpec, on_load_progress: Callable[[int, int], None] | None = None
    ) -> AsyncLLM | None:
        """Take this process's part in a job, on every rank of it. Blocks until the models are loaded.

        Args:
            config: of the job, the same on every rank.
            on_load_progress: called from another thread with the bytes of weights that are in place and that will be,
                over all ranks.

        Returns:
            An AsyncLLM on rank 0, or in a job of one process. None on worker ranks, once they have served to the end.

        Raises:
            TrtrunError: as of `LLMEngine.open`.
        """
        place = find_mpi_rank()
        if place is not None and place.rank != 0:
            LLMEngine.open(config, on_load_progress)
            return None
        # Devices, and the threads that CPU kernels run on, belong to the thread that opened them: it steps, too.
        thread = EngineThread(lambda: LLMEngine.open(config, on_load_progress))
        engine = thread.start()
        assert engine is not None
        return cls(thread, engine)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: RequestId | None = None,
        generated: Mapping[int, Sequence[int]] | None = None,
        group: Hashable = None,
        owner: Hashable = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Complete a prompt and yield what is new, until all its completions have ended.

        Ending the iteration early, or throwing the iterator away, aborts the request.

        Args:
            prompt: a text or token ids.
            sampling: None is the engine core's `default_sampling`.
            request_id: the caller's own, which `abort` takes; None makes one.
            generated, group, owner: see `LLMEngine.add_request`.

        Yields:
            Deltas in the order of rounds, those of each completion apart. Where the reader was slower than the rounds,
            one delta holds what several have added.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
            QueueFullError: as many wait as may.
            RankFailedError: a rank failed; the job is over.
        """
        if request_id is None:
            request_id = f"async {next(self._numbers)}"
        mailbox = Mailbox(asyncio.get_running_loop())
        parameters = sampling or self.engine.default_sampling
        self._thread.add([Arrival(mailbox, request_id, prompt, parameters, generated, group, owner)])
        try:
            while deltas := await mailbox.take():
                for delta in deltas:
                    yield delta
        finally:
            if not mailbox.is_over:
                self._thread.abort(request_id, mailbox)

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        """Complete prompts as `generate` does, and give what comes to their recipients in the engine core's thread.

        For frontends that hand on what comes, such as to another process: no event loop has to wake up for it, and the
        rounds wait for none. The frontend has checked the requests, and they begin together. What goes wrong ends a
        recipient. `abort` ends a request.
        """
        self._thread.add(arrivals, are_checked=True)

    def abort(self, request_id: RequestId) -> None:
        """End a request before its next round; its iterator ends with what it has. Nothing where it is not known. Any
        thread may call it."""
        self._thread.abort(request_id)

    async def call(self, work: Callable[[LLMEngine], T]) -> T:
        """Do something between two rounds, in the engine core's thread, and return what it returns.

        Raises:
            RankFailedError: a rank failed; the job is over.
        """
        return await asyncio.wrap_future(self._thread.call(work))

    async def statistics(self) -> dict[str, Any]:
        """Totals since the start, ready for JSON; times are seconds."""
        return await self.call(LLMEngine.statistics)

    def close(self) -> None:
        """Let all ranks end; iterators that still run raise InvalidRequestError. Calling it again does nothing."""
        self._finalizer()


@dataclass(frozen=True)
class LoopOutlet(Outlet):
    """Wakes readers in an event loop; one call wakes all of a round."""

    loop: asyncio.AbstractEventLoop

    def flush(self, recipients: Sequence[Mailbox]) -> None:
        """Wake the readers of mailboxes."""
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            self.loop.call_soon_threadsafe(_wake, recipients)


class Mailbox(Recipient):
    """What one reader in an event loop has not taken yet. The engine's thread puts, the reader takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(LoopOutlet(loop))
        self._deltas: deque[CompletionDelta] = deque()
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def _keep(self, delta: CompletionDelta) -> None:
        self._deltas.append(msgspec.structs.replace(delta, statistics=delta.statistics.copy()))

    def _keep_error(self, error: BaseException | None) -> None:
        self._error = error

    def wake(self) -> None:
        """Tell the reader that there is news. In the reader's loop."""
        self._has_news.set()

    async def take(self) -> list[CompletionDelta]:
        """Wait for news and return them, one delta a completion; none once the request is over.

        Raises:
            TrtrunError: what ended the request, once all deltas before it are taken.
        """
        while True:
            self._has_news.clear()
            is_over = self.is_over  # looked at before the deltas, as it comes after them
            if self._deltas:
                break
            if is_over and self._error is not None:
                raise self._error
            if is_over:
                return []
            await self._has_news.wait()
        found: dict[int, list[CompletionDelta]] = {}
        while self._deltas:
            delta = self._deltas.popleft()
            found.setdefault(delta.index, []).append(delta)
        return [merge_deltas(deltas) for deltas in found.values()]


def _wake(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
