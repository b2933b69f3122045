"""An engine core with a thread of its own: orders between rounds, rounds while there is work, mailboxes for what comes.

The engine core belongs to one thread, and so do the device and the threads of CPU kernels that it was opened on. Any
thread may order something; readers take their deltas in event loops, at their own pace. It does not know who reads, or
how a round runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from trtrun.errors import InvalidRequestError, RankFailedError, TrtrunError
from trtrun.llm_engine import LLMEngine
from trtrun.outputs import CompletionDelta, RequestId, merge_deltas
from trtrun.prompts import Prompt
from trtrun.sampling_params import SamplingParams

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Mailbox:
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


class EngineThread:
    """The one thread of an engine core: orders between rounds, rounds as long as there is work, sleep without it."""

    def __init__(self, open_engine: Callable[[], LLMEngine | None]) -> None:
        self._open = open_engine
        self._opened: Future[LLMEngine | None] = Future()
        self._orders: deque[_Order] = deque()
        self._has_orders = threading.Condition()
        self._is_closing = False
        self._over: TrtrunError | None = None
        self._told_failure: RankFailedError | None = None
        self._mailboxes: dict[RequestId, Mailbox] = {}
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
        mailbox: Mailbox,
        request_id: RequestId,
        prompt: Prompt,
        sampling: SamplingParams | None,
        generated: Mapping[int, Sequence[int]] | None,
        group: Hashable = None,
    ) -> None:
        """Have a request added; what becomes of it goes to the mailbox."""

        def work(engine: LLMEngine) -> None:
            try:
                engine.add_request(prompt, sampling, request_id, generated, group)
            except Exception as error:
                refuse(error)
                return
            mailbox.begin(len(generated) if generated is not None else sampling.n if sampling is not None else 1)
            self._mailboxes[request_id] = mailbox

        def refuse(error: Exception) -> None:
            mailbox.end(error)
            _wake([mailbox])

        self._order(_Order(work, refuse))

    def abort(self, request_id: RequestId, mailbox: Mailbox | None = None) -> None:
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
        news: dict[Mailbox, None] = {}
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


def _wake(mailboxes: Iterable[Mailbox]) -> None:
    """Tell readers that there is news, each loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    for mailbox in mailboxes:
        loops.setdefault(mailbox.loop, []).append(mailbox)
    for loop, woken in loops.items():
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            loop.call_soon_threadsafe(_wake_here, woken)


def _wake_here(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
