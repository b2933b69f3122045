"""The front's side of the engine's socket: requests that outlive engines.

A request is sent to the engine that is there, and whatever comes back is kept: its tokens, as long as it goes on. When
the engine's connection ends, the request waits; the next engine gets it with those tokens and goes on behind them, and
its reader sees a pause. It knows the messages. It does not know how engines are started (`engine_keeper`), or what
prompts and texts are for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from launch.serve.engine_socket import listen
from launch.serve.messages import (
    Abort,
    AskStatus,
    Close,
    Delta,
    Deltas,
    Ended,
    Generate,
    Message,
    MessageError,
    MessageStream,
    Ready,
    Status,
    encode,
)
from launch.serve.refusals import Kind, Refusal
from trtrun.outputs import CompletionDelta, merge_deltas
from trtrun.request_statistics import RequestStatistics
from trtrun.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits

MOST_LOSSES = 3
"""Engines that a request may lose in a row without a token in between: it may be what ends them. No more than the
restarts that a server has by default: the others go on."""

STATUS_SECONDS = 1.0
"""How long an engine may take to say how full it is: a round, for most."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to complete.

    Attributes:
        prompt_token_ids: checked against the model and the engine's limits.
        sampling: with a seed, so that another engine goes on with the same tokens.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class Inbox:
    """What one reader has not taken yet of its requests, which it numbers. Never full: a reader that is slow gets fewer
    and larger deltas, with no more tokens than it asked for."""

    def __init__(self) -> None:
        self._deltas: dict[tuple[int, int], list[CompletionDelta]] = {}
        self._error: Refusal | None = None
        self._has_news = asyncio.Event()

    def put(self, number: int, delta: CompletionDelta) -> None:
        """Keep what came of request `number`."""
        self._deltas.setdefault((number, delta.index), []).append(delta)
        self._has_news.set()

    def end(self, error: Refusal) -> None:
        """Nothing will come any more, of any request."""
        self._error = self._error or error
        self._has_news.set()

    async def take(self) -> list[tuple[int, CompletionDelta]]:
        """Wait for news and return them with the numbers of their requests, one delta a completion.

        Raises:
            Refusal: the end came instead, once all before it is taken.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            await self._has_news.wait()
            self._has_news.clear()
        taken, self._deltas = self._deltas, {}
        self._has_news.clear()
        if self._error is not None:
            self._has_news.set()
        return [(number, merge_deltas(deltas)) for (number, _), deltas in taken.items()]


@dataclass(eq=False)
class _OpenRequest:
    """A request that goes on, with all that a new engine needs to go on with it.

    Attributes:
        generated: output tokens of each completion that goes on.
        group: of the requests that came with it.
        before: counters of each completion from engines that are gone.
        told: counters of each completion that its reader has been told, `before` among them.
        num_losses: engines that it has lost since its last token.
    """

    request_id: str
    number: int
    request: EngineRequest
    inbox: Inbox
    generated: dict[int, list[int]]
    group: str
    before: dict[int, RequestStatistics] = field(default_factory=dict)
    told: dict[int, RequestStatistics] = field(default_factory=dict)
    num_losses: int = 0

    def message(self) -> Generate:
        """What an engine is sent, a first or a later one."""
        has_begun = len(self.generated) < self.request.sampling.n or any(self.generated.values())
        generated = {index: tuple(tokens) for index, tokens in self.generated.items()} if has_begun else None
        return Generate.of(self.request_id, self.request.prompt_token_ids, self.request.sampling, generated, self.group)

    def take(self, delta: CompletionDelta) -> None:
        """Keep an engine's delta, and tell the reader."""
        before = self.before.get(delta.index)
        if before is not None:
            delta = replace(delta, statistics=_add(before, delta.statistics))
        self.told[delta.index] = delta.statistics
        self.generated[delta.index] += delta.token_ids
        self.num_losses = 0
        if delta.finish_reason is not None:
            del self.generated[delta.index]
        self.inbox.put(self.number, delta)

    def lose_engine(self) -> None:
        """The engine is gone: the next one counts from zero."""
        self.before = dict(self.told)
        self.num_losses += 1


class EngineClient:
    """All requests of the front, and the engine that is there, if one is.

    Attributes:
        ready: what the engine has said of itself; None while there is none.
        limits: of that engine.
        accepts: asked whether an engine may have the requests, before it gets any.
        on_ready, on_lost: called when an engine is there, and when it is gone.
    """

    def __init__(self) -> None:
        self.ready: Ready | None = None
        self.limits: SchedulerLimits | None = None
        self.accepts: Callable[[Ready], bool] = lambda ready: True
        self.on_ready: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._writer: asyncio.StreamWriter | None = None
        self._requests: dict[str, _OpenRequest] = {}
        self._ids = count()
        self._statuses: deque[asyncio.Future[Status]] = deque()
        self._server: asyncio.Server | None = None

    @property
    def num_requests(self) -> int:
        """Requests that go on."""
        return len(self._requests)

    async def listen(self, socket: str) -> None:
        """Wait for engines at a socket, one after the other."""
        self._server = await listen(socket, self._serve)

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox) -> list[str]:
        """Have requests completed; what comes of them goes to the inbox, under their places in the list.

        Returns:
            Their ids, for `abort`.
        """
        ids: list[str] = []
        for number, request in enumerate(requests):
            request_id = f"request {next(self._ids)}"
            generated: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
            group = ids[0] if ids else request_id
            opened = _OpenRequest(request_id, number, request, inbox, generated, group)
            self._requests[request_id] = opened
            self._submit(opened)
            ids.append(request_id)
        return ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those that have ended are passed over."""
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._send(Abort(request_id=request_id))

    def end_all(self, error: Refusal) -> None:
        """End every request with an error that its reader is told."""
        for opened in list(self._requests.values()):
            opened.inbox.end(error)
        self.abort(list(self._requests))

    async def ask_status(self) -> Status | None:
        """How full the engine is; None where there is none, or it does not say so in time."""
        if self._writer is None:
            return None
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._statuses.append(answer)
        self._send(AskStatus())
        try:
            return await asyncio.wait_for(answer, STATUS_SECONDS)
        except (TimeoutError, asyncio.CancelledError):
            return None

    def drop(self) -> None:
        """The engine's process has ended: what is left of it, such as ranks without their mpirun, is no longer listened
        to, and ends when it notices."""
        if self._writer is not None:
            self._writer.close()
            self._detach()

    def close(self) -> None:
        """Ask the engine to end, and listen no more."""
        if self._server is not None:
            self._server.close()
        self._send(Close())

    def _submit(self, opened: _OpenRequest) -> None:
        """Send a request to the engine that is there, for the first time or again."""
        try:
            self._send(opened.message())
        except MessageError as error:
            del self._requests[opened.request_id]
            opened.inbox.end(Refusal(Kind.TOO_LARGE, str(error)))

    def _send(self, message: Message) -> None:
        # Without an engine nothing is lost: the next one is sent all that goes on.
        if self._writer is not None:
            with suppress(ConnectionError):
                self._writer.write(encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One engine's connection, from its first message to its end."""
        try:
            messages = MessageStream(reader)
            ready = await messages.read()
            if not isinstance(ready, Ready) or self._writer is not None:
                logger.error("a connection to the engine's socket was no engine's, or came while another one was there")
                return
            if not self.accepts(ready):
                return
            self._attach(ready, writer)
            while (message := await messages.read()) is not None and self._writer is writer:
                self._take(message)
        except MessageError as error:
            logger.error("%s", error)
        finally:
            if self._writer is writer:
                self._detach()
            writer.close()

    def _attach(self, ready: Ready, writer: asyncio.StreamWriter) -> None:
        self.ready, self.limits, self._writer = ready, ready.scheduler_limits(), writer
        for opened in list(self._requests.values()):
            self._submit(opened)
        self.on_ready()

    def _detach(self) -> None:
        self.ready = self.limits = self._writer = None
        for answer in self._statuses:
            answer.cancel()
        self._statuses.clear()
        for opened in list(self._requests.values()):
            opened.lose_engine()
            if opened.num_losses >= MOST_LOSSES:
                del self._requests[opened.request_id]
                opened.inbox.end(
                    Refusal(Kind.FAILED, f"the engine ended {MOST_LOSSES} times in a row while it had this request")
                )
        self.on_lost()

    def _take(self, message: Message) -> None:
        match message:
            case Deltas():
                for delta in message.deltas:
                    self._take_delta(delta)
            case Ended():
                opened = self._requests.pop(message.request_id, None)
                if opened is not None:
                    opened.inbox.end(Refusal(Kind.INVALID, message.error))
            case Status():
                while self._statuses:
                    answer = self._statuses.popleft()
                    if not answer.done():
                        answer.set_result(message)
                        return
            case _:
                raise MessageError(f"the engine sent a message that is the front's: {type(message).__name__}")

    def _take_delta(self, delta: Delta) -> None:
        opened = self._requests.get(delta.request_id)
        if opened is not None and delta.index in opened.generated:
            opened.take(delta.completion_delta())
            if not opened.generated:
                del self._requests[delta.request_id]


def _add(before: RequestStatistics, now: RequestStatistics) -> RequestStatistics:
    """Counters of a completion over several engines."""
    length = max(len(before.acceptance_histogram), len(now.acceptance_histogram))
    histogram = [0] * length
    for counts in (before.acceptance_histogram, now.acceptance_histogram):
        for place, number in enumerate(counts):
            histogram[place] += number
    return RequestStatistics(
        num_rounds=before.num_rounds + now.num_rounds,
        num_draft_tokens=before.num_draft_tokens + now.num_draft_tokens,
        num_accepted_draft_tokens=before.num_accepted_draft_tokens + now.num_accepted_draft_tokens,
        num_cached_prompt_tokens=before.num_cached_prompt_tokens,
        num_preemptions=before.num_preemptions + now.num_preemptions,
        admitted=before.admitted,
        acceptance_histogram=histogram,
    )
