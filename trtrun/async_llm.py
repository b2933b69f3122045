"""The Python API for programs with an event loop, such as a server: prompts in, deltas out as rounds commit them.

    llm = AsyncLLM.open(load_config("run.yaml"))     # on every rank; None on worker ranks, once they have served
    async for delta in llm.generate("def main(", SamplingParams(max_tokens=64)):
        print(delta.text, end="")

The engine core is opened, stepped and closed by a thread of its own (`_EngineThread`), because it belongs to one thread
and because a round must not wait for an event loop, nor the loop for a round. Readers never slow the rounds: what a
reader has not taken yet is kept for it, a delta a round, which is never more than the tokens that it asked for, and is
handed over as one delta.

This module knows threads and event loops. It does not know rounds, ranks or who reads the texts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, TypeVar

from parallel.mpi_rank import find_mpi_rank
from trtrun.config import RuntimeConfig
from trtrun.errors import InvalidRequestError, RankFailedError, TrtrunError
from trtrun.llm_engine import LLMEngine
from trtrun.outputs import CompletionDelta, RequestId, StartReport, merge_deltas
from trtrun.prompts import Prompt
from trtrun.sampling_params import SamplingParams
from trtrun.text import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A target model, optionally with a draft model, whose completions are read from event loops. Made by `open`.

    Attributes:
        engine: the engine core. Only its thread may change it; `call` does something there.
        config: what it was made from.
        report: what each rank holds.
        tokenizer: None when the checkpoint has none; prompts are then token ids.
    """

    def __init__(self, thread: _EngineThread, engine: LLMEngine) -> None:
        self.engine = engine
        self.config: RuntimeConfig = engine.config
        self.report: StartReport = engine.report
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self._thread = thread
        self._numbers = count()
        # As of `LLM`: a program that forgets to close must not leave the other ranks waiting.
        self._finalizer = weakref.finalize(self, thread.close)

    @classmethod
    def open(cls, config: RuntimeConfig, on_load_progress: Callable[[int, int], None] | None = None) -> AsyncLLM | None:
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
        thread = _EngineThread(lambda: LLMEngine.open(config, on_load_progress))
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
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Complete a prompt and yield what is new, until all its completions have ended.

        Ending the iteration early, or throwing the iterator away, aborts the request.

        Args:
            prompt: a text or token ids.
            sampling: None is greedy.
            request_id: the caller's own, which `abort` takes; None makes one.
            generated: see `LLMEngine.add_request`.

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
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._thread.add(mailbox, request_id, prompt, sampling, generated)
        try:
            while deltas := await mailbox.take():
                for delta in deltas:
                    yield delta
        finally:
            if not mailbox.is_over:
                self._thread.abort(request_id, mailbox)

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


class _Mailbox:
    """What one reader has not taken yet. The engine's thread puts, the reader's event loop takes.

    Attributes:
        loop: the reader's.
        is_over: whether nothing will be put any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.is_over = False
        self._num_going_on = 0
        self._deltas: deque[CompletionDelta] = deque()
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def begin(self, num_completions: int) -> None:
        """The request has been added. In the engine's thread."""
        self._num_going_on = num_completions

    def put(self, delta: CompletionDelta) -> None:
        """Keep a delta. In the engine's thread; `wake` follows."""
        self._deltas.append(delta)
        self._num_going_on -= delta.finish_reason is not None
        self.is_over = self._num_going_on == 0

    def end(self, error: BaseException | None = None) -> None:
        """Nothing will come any more, and why not. In the engine's thread; `wake` follows."""
        self._error = error
        self.is_over = True

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


class _Order(NamedTuple):
    """Something to do between two rounds, and what to do with the reason where there will be none."""

    do: Callable[[LLMEngine], None]
    refuse: Callable[[Exception], None]


class _EngineThread:
    """The one thread of an engine core: orders between rounds, rounds as long as there is work, sleep without it."""

    def __init__(self, open_engine: Callable[[], LLMEngine | None]) -> None:
        self._open = open_engine
        self._opened: Future[LLMEngine | None] = Future()
        self._orders: deque[_Order] = deque()
        self._has_orders = threading.Condition()
        self._is_closing = False
        self._over: TrtrunError | None = None
        self._told_failure: RankFailedError | None = None
        self._mailboxes: dict[RequestId, _Mailbox] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> LLMEngine | None:
        """Start the thread and wait for the engine core.

        Raises:
            TrtrunError: it cannot be opened.
        """
        self._thread.start()
        return self._opened.result()

    def add(
        self,
        mailbox: _Mailbox,
        request_id: RequestId,
        prompt: Prompt,
        sampling: SamplingParams | None,
        generated: Mapping[int, Sequence[int]] | None,
    ) -> None:
        """Have a request added; what becomes of it goes to the mailbox."""

        def work(engine: LLMEngine) -> None:
            try:
                engine.add_request(prompt, sampling, request_id, generated)
            except Exception as error:
                refuse(error)
                return
            mailbox.begin(len(generated) if generated is not None else sampling.n if sampling is not None else 1)
            self._mailboxes[request_id] = mailbox

        def refuse(error: Exception) -> None:
            mailbox.end(error)
            _wake([mailbox])

        self._order(_Order(work, refuse))

    def abort(self, request_id: RequestId, mailbox: _Mailbox | None = None) -> None:
        """Have a request aborted; with a mailbox only if the id is still that request's."""

        def work(engine: LLMEngine) -> None:
            found = self._mailboxes.get(request_id)
            if found is not None and mailbox in (None, found):
                del self._mailboxes[request_id]
                engine.abort_request(request_id)
                found.end()
                _wake([found])

        self._order(_Order(work, lambda error: None))

    def call(self, work: Callable[[LLMEngine], T]) -> Future[T]:
        """Have something done between two rounds."""
        future: Future[T] = Future()

        def run(engine: LLMEngine) -> None:
            try:
                future.set_result(work(engine))
            except Exception as error:
                future.set_exception(error)

        self._order(_Order(run, future.set_exception))
        return future

    def close(self) -> None:
        """Close the engine core and end the thread.

        Raises:
            RankFailedError: a rank failed, and nobody was told so yet.
        """
        with self._has_orders:
            self._is_closing = True
            self._has_orders.notify()
        self._thread.join()
        error, self._told_failure = self._told_failure, None
        if error is not None:
            raise error

    def _order(self, order: _Order) -> None:
        """Queue something for between two rounds, or refuse it where no round will ever come."""
        with self._has_orders:
            if self._over is None:
                self._orders.append(order)
                self._has_orders.notify()
                return
        order.refuse(self._over)

    def _run(self) -> None:
        try:
            engine = self._open()
        except BaseException as error:
            self._end(InvalidRequestError("this AsyncLLM was never open"))
            self._opened.set_exception(error)
            return
        self._opened.set_result(engine)
        if engine is None:
            return
        try:
            while self._do_orders(engine):
                self._step(engine)
            self._end(InvalidRequestError("this AsyncLLM is closed: make another one"))
        except RankFailedError as error:
            logger.error("%s", error)
            self._end(error)
        except BaseException as error:
            logger.exception("the engine's thread failed")
            self._end(RankFailedError(f"the engine's thread failed ({type(error).__name__}: {error}); start it again"))
        try:
            engine.close()
        except RankFailedError as error:
            self._told_failure = error

    def _do_orders(self, engine: LLMEngine) -> bool:
        """Do what is ordered, once there is something to do; whether the engine goes on."""
        with self._has_orders:
            while not (self._orders or self._is_closing or engine.has_work):
                self._has_orders.wait()
            orders, self._orders = self._orders, deque()
        for order in orders:
            order.do(engine)
        return not self._is_closing

    def _step(self, engine: LLMEngine) -> None:
        if not engine.has_work:
            return
        try:
            deltas = engine.step()
        except RankFailedError:
            raise
        except Exception:
            # The engine core is whole again, and its next step tells the requests that were lost.
            logger.exception("a round failed")
            return
        news: dict[_Mailbox, None] = {}
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            # What the delta shows of the counters goes on counting.
            mailbox.put(replace(delta, statistics=delta.statistics.copy()))
            news[mailbox] = None
            if mailbox.is_over:
                del self._mailboxes[delta.request_id]
        _wake(news)

    def _end(self, over: TrtrunError) -> None:
        """Nothing is done any more from here on, and everybody is told why."""
        with self._has_orders:
            self._over = over
            orders, self._orders = self._orders, deque()
        for mailbox in self._mailboxes.values():
            mailbox.end(over)
        _wake(self._mailboxes.values())
        self._mailboxes.clear()
        for order in orders:
            order.refuse(over)


def _wake(mailboxes: Iterable[_Mailbox]) -> None:
    """Tell readers that there is news, each loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = {}
    for mailbox in mailboxes:
        loops.setdefault(mailbox.loop, []).append(mailbox)
    for loop, woken in loops.items():
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            loop.call_soon_threadsafe(_wake_here, woken)


def _wake_here(mailboxes: Sequence[_Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
