"""An engine core with a thread of its own: orders between rounds, rounds while there is work, recipients of what comes.

The engine core belongs to one thread, and so do the device and the threads of CPU kernels that it was opened on. Any
thread may order something; what comes of a request is put into its recipient, and once a round every way out, an
outlet, is told, whatever the number of its recipients.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from parallel.watchdog.activity import Phase
from parallel.watchdog.heartbeat_server import heartbeat_interval
from trtrun.api.llm_engine import LLMEngine
from trtrun.api.prompts import Prompt
from trtrun.core.outputs import CompletionDelta, RequestId
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, RankFailedError, TrtrunError

T = TypeVar("T")

GATHER_SECONDS = 0.0002
"""After a rest the first round begins once no request has come for so long: requests that are sent one right after the
other come in less. A frontend sends together what came together."""

MOST_GATHER_SECONDS = 0.004
"""How long that may take."""

MOST_SECONDS = 0.005
"""The most of the thread's time for requests that come, before rows have their next round: the rest is added behind
it."""

logger = logging.getLogger(__name__)


class Outlet(ABC):
    """A way out of the engine's thread."""

    @abstractmethod
    def flush(self, recipients: Sequence[Any]) -> None:
        """These of its recipients have got something. Once a round, in the engine's thread: it must not wait."""


class Recipient(ABC):
    """What becomes of one request. The engine's thread calls it, or whoever orders when there is no engine any more.

    Attributes:
        outlet: flushed after the recipient got something.
        is_over: whether nothing will be put any more.
    """

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.is_over = False
        self._num_going_on = 0

    def begin(self, num_completions: int) -> None:
        """The request has been added."""
        self._num_going_on = num_completions

    def put(self, delta: CompletionDelta) -> None:
        """Keep a delta, whose statistics go on counting once the outlet is flushed."""
        self._keep(delta)
        self._num_going_on -= delta.finish_reason is not None
        self.is_over = self._num_going_on == 0

    def end(self, error: BaseException | None = None) -> None:
        """End it: nothing more will come, for this reason; None if it was aborted."""
        self._keep_error(error)
        self.is_over = True

    @abstractmethod
    def _keep(self, delta: CompletionDelta) -> None:
        """A delta came."""

    @abstractmethod
    def _keep_error(self, error: BaseException | None) -> None:
        """The request ended before its completions had."""


def flush(recipients: Iterable[Recipient]) -> None:
    """Tell the outlets of recipients that got something, each once."""
    outlets: dict[Outlet, list[Recipient]] = {}
    for recipient in recipients:
        outlets.setdefault(recipient.outlet, []).append(recipient)
    for outlet, told in outlets.items():
        outlet.flush(told)


class Arrival(NamedTuple):
    """A request that is to be added, and where goes what becomes of it; see `LLMEngine.add_request`."""

    recipient: Recipient
    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParams
    generated: Mapping[int, Sequence[int]] | None = None
    group: Hashable = None
    owner: Hashable = None


class _Order(NamedTuple):
    """Something to do between two rounds, which may leave a part for behind the next one, and what to do with the
    reason where there will be none."""

    do: Callable[[LLMEngine], _Order | None]
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
        self._recipients: dict[RequestId, Recipient] = {}
        self._gathers = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> LLMEngine | None:
        """Start the thread and wait for the engine core.

        Raises:
            TrtrunError: it cannot be opened.
        """
        self._thread.start()
        return self._opened.result()

    def add(self, arrivals: Sequence[Arrival], are_checked: bool = False) -> None:
        """Have requests added, which begin together.

        Args:
            arrivals: what becomes of each goes to its recipient, also why it is not added.
            are_checked: by a frontend, as `LLMEngine.add_request` would; and no others are waited for.
        """

        def work(engine: LLMEngine, left: Sequence[Arrival] = arrivals) -> _Order | None:
            add = engine.add_checked if are_checked else engine.add_request
            began = time.thread_time()
            for place, arrival in enumerate(left):
                if place and engine.has_work and time.thread_time() - began > MOST_SECONDS:
                    rest = left[place:]
                    return _Order(partial(work, left=rest), partial(refuse, refused=rest))
                recipient, request_id, prompt, sampling, generated, group, owner = arrival
                try:
                    add(prompt, sampling, request_id, generated, group, owner)
                except Exception as error:
                    refuse(error, [arrival])
                    continue
                recipient.begin(sampling.n if generated is None else len(generated))
                self._recipients[request_id] = recipient
                self._gathers = not are_checked
            return None

        def refuse(error: Exception, refused: Sequence[Arrival] = arrivals) -> None:
            for arrival in refused:
                arrival.recipient.end(error)
            flush(arrival.recipient for arrival in refused)

        self._order(_Order(work, refuse))

    def abort(self, request_id: RequestId, recipient: Recipient | None = None) -> None:
        """Have a request aborted; with a recipient only if the id is still that request's."""

        def work(engine: LLMEngine) -> None:
            found = self._recipients.get(request_id)
            if found is not None and recipient in (None, found):
                del self._recipients[request_id]
                engine.abort_request(request_id)
                found.end()
                flush([found])

        self._order(_Order(work, lambda error: None))

    def call(self, work: Callable[[LLMEngine], T]) -> Future[T]:
        """Have something done between two rounds, unless the future has been cancelled until then."""
        future: Future[T] = Future()

        # Who has given up waiting has cancelled the future, which then takes nothing any more.
        def run(engine: LLMEngine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(engine))
            except Exception as error:
                future.set_exception(error)

        def refuse(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._order(_Order(run, refuse))
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
            engine.activity.ticks = True
            while self._do_orders(engine):
                engine.activity.advance()
                self._step(engine)
            self._end(InvalidRequestError("this AsyncLLM is closed: make another one"))
        except RankFailedError as error:
            # Everybody who waits is told; a terminal need not hear it twice.
            logger.error("%s", error, extra={"file_only": True})
            self._end(error)
        except BaseException as error:
            logger.exception("the engine's thread failed")
            self._end(RankFailedError(f"the engine's thread failed ({type(error).__name__}: {error}); start it again"))
        try:
            engine.close()
        except RankFailedError as error:
            self._told_failure = error

    def _do_orders(self, engine: LLMEngine) -> bool:
        """Do what is ordered, once there is something to do; whether the engine goes on. Without anything to do it
        still says now and then that it is there: one that hangs does not."""
        tick = heartbeat_interval(engine.config.launch.heartbeat_seconds)
        with self._has_orders:
            while not (self._orders or self._is_closing or engine.has_work):
                self._has_orders.wait(tick)
                engine.activity.advance()
        was_idle = not engine.has_work
        self._do_waiting(engine)
        if was_idle and engine.has_work and self._gathers:
            self._gather(engine)
        return not self._is_closing

    def _gather(self, engine: LLMEngine) -> None:
        """Wait a moment for more, before the first round after a rest. Requests often come several at once, and a round
        that has begun with the first one alone makes all others wait for its end."""
        deadline = time.monotonic() + MOST_GATHER_SECONDS
        while not self._is_closing and time.monotonic() < deadline:
            with self._has_orders:
                if not self._orders and not self._has_orders.wait(GATHER_SECONDS):
                    return
            self._do_waiting(engine)

    def _do_waiting(self, engine: LLMEngine) -> None:
        with self._has_orders:
            orders, self._orders = self._orders, deque()
        if not orders:
            return
        began = time.thread_time()
        with engine.activity.between(Phase.ORDERED):
            while orders:
                rest = orders.popleft().do(engine)
                if rest is not None:  # what was ordered behind it may be about it
                    with self._has_orders:
                        self._orders.extendleft([*reversed(orders), rest])
                    break
        engine.add_request_work("arrivals", time.thread_time() - began)

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
        news: dict[Recipient, None] = {}
        for delta in deltas:
            recipient = self._recipients.get(delta.request_id)
            if recipient is None:
                continue
            recipient.put(delta)
            news[recipient] = None
            if recipient.is_over:
                del self._recipients[delta.request_id]
        flush(news)

    def _end(self, over: TrtrunError) -> None:
        """End all work and tell everybody why."""
        with self._has_orders:
            self._over = over
            orders, self._orders = self._orders, deque()
        for recipient in self._recipients.values():
            recipient.end(over)
        flush(self._recipients.values())
        self._recipients.clear()
        for order in orders:
            order.refuse(over)
