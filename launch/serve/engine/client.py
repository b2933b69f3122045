"""The frontend's side of the engine, wherever that runs: behind a socket, of another process or of this one.

A request is sent to the engine that is there, together with those of the same turn of the event loop, and begins with
them. Whatever comes back is kept: its tokens, as long as it goes on. When the engine's connection ends, the request
waits; the next engine gets it with those tokens and goes on behind them, and its reader sees a pause (`open_requests`).
Requests that may be what ends engines are given up, too. It does not know how engines are started (`keeper`), or what
prompts and texts are for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count

import msgspec

from launch.serve.admission.event_loop_stalls import YieldTimer
from launch.serve.admission.refusals import Kind, Refusal, engine_starting
from launch.serve.engine.adapters import AdapterChange, AdapterRegistry
from launch.serve.engine.handshake import listen
from launch.serve.engine.messages import (
    Abort,
    AdapterChanged,
    AskStatus,
    Begin,
    Close,
    Deltas,
    Ended,
    Heartbeat,
    LoadAdapter,
    Message,
    MessageError,
    MessageStream,
    Ready,
    Standing,
    Status,
    encode,
)
from launch.serve.engine.open_requests import (
    EngineRequest,
    FaultAttribution,
    FaultyRequest,
    Inbox,
    OpenRequest,
    has_progress,
)
from trtrun.core.outputs import CompletionDelta
from trtrun.scheduling.limits import SchedulerLimits

STATUS_SECONDS = 1.0
"""How long an engine may take to say how full it is: a round, for most."""

MOST_TOGETHER = 1 << 16
"""Tokens of requests that are sent as one, which is not held for others beyond that."""

logger = logging.getLogger(__name__)


class EngineClient:
    """All requests of the frontend, and the engine that is there, if one is.

    Attributes:
        ready: what the engine has said of itself; None while there is none.
        limits: of that engine.
        accepts: asked whether an engine may have the requests, before it gets any.
        adapters: that engines have to have.
        on_ready, on_lost: called when an engine is there, and when it is gone.
        on_heartbeat: called with its signs of life.
        on_faulty_request: called with the numbers of engines that a request has ended, which is given up.
    """

    def __init__(self, name: str = "request") -> None:
        """Begin without an engine; `name` begins the ids of its requests, which no other client's have."""
        self._name = name
        self._heir: EngineClient | None = None
        self.ready: Ready | None = None
        self.limits: SchedulerLimits | None = None
        self.adapters = AdapterRegistry()
        self.accepts: Callable[[Ready], bool] = lambda ready: True
        self.on_ready: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self.on_faulty_request: Callable[[Collection[int]], None] = lambda engines: None
        self._writer: asyncio.StreamWriter | None = None
        self._beginning: list[OpenRequest] = []
        self._num_together = 0
        self._requests: dict[str, OpenRequest] = {}
        self._ids = count()
        self._attribution = FaultAttribution()
        self._suspected_ends: set[int] = set()
        self._lost: int | None = None
        self._statuses: deque[asyncio.Future[Status | None]] = deque()
        self._changes: deque[tuple[AdapterChange, asyncio.Future[None] | None]] = deque()
        self._server: asyncio.Server | None = None
        self._heartbeat: Heartbeat | None = None
        self._heard = self._absent_since = time.monotonic()

    @property
    def num_requests(self) -> int:
        """Requests that go on."""
        return len(self._requests)

    def standings(self) -> list[Standing]:
        """The phase of each process of the engine, and since when it is in it, as last reported."""
        now = time.monotonic()
        if self.ready is None:
            since = now - self._absent_since
            return [Standing(rank=0, phase="start", doing="starting", seconds=since, still_seconds=since)]
        if self._heartbeat is None:
            return []
        ago = now - self._heard
        return [msgspec.structs.replace(one, seconds=one.seconds + ago) for one in self._heartbeat.standings]

    async def listen(self, socket: str) -> None:
        """Wait for engines at a socket, one after the other."""
        self._server = await listen(socket, self.serve)

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox) -> list[str]:
        """Have requests completed; what comes of them goes to the inbox, under their places in the list.

        Args:
            requests: that came together.
            inbox: their reader's.

        Returns:
            Their ids, for `abort`.
        """
        ids: list[str] = []
        for number, request in enumerate(requests):
            request_id = f"{self._name} {next(self._ids)}"
            generated = {index: list(tokens) for index, tokens in request.going_on().items()}
            group = ids[0] if ids else request_id
            opened = OpenRequest(request_id, number, request, inbox, generated, group)
            self._requests[request_id] = opened
            self._submit(opened)
            ids.append(request_id)
        return ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those that have ended are passed over."""
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._send(Abort(request_id=request_id))
                self._go_on_behind(request_id)
            elif self._heir is not None:
                self._heir.abort([request_id])

    def move_to(self, other: EngineClient) -> int:
        """Have another client's engine go on with all requests, behind the tokens that they have; returns how many."""
        moved = list(self._requests.values())
        self._heir, other._heir = None, None
        self.abort([opened.request_id for opened in moved])
        self._heir = other
        for opened in moved:
            opened.leave_engine()
            other._requests[opened.request_id] = opened
            other._submit(opened)
        return len(moved)

    def end_all(self, error: Refusal) -> None:
        """End every request with an error that its reader is told."""
        for opened in list(self._requests.values()):
            opened.inbox.end(error)
        self.abort(list(self._requests))

    async def ask_status(self) -> Status | None:
        """How full the engine is; None where there is none, or it does not say so in time."""
        if self._writer is None:
            return None
        answer: asyncio.Future[Status | None] = asyncio.get_running_loop().create_future()
        self._statuses.append(answer)
        self._send(AskStatus())
        try:
            return await asyncio.wait_for(answer, STATUS_SECONDS)
        except TimeoutError:
            return None

    async def change_adapters(self, change: AdapterChange) -> None:
        """Have the engine load or drop an adapter, and wait for it.

        Raises:
            Refusal: there is no engine, or none any more, or it says what is wrong.
        """
        if self._writer is None:
            raise engine_starting()
        name, in_use = change.lora_name, self._adapters_in_use()
        for drop in self.adapters.clear(in_use):
            self._change_adapters(drop, None)
        if isinstance(change, LoadAdapter) and name in in_use and name not in self.adapters.offered:
            line = f"requests still have the adapter {name!r} that was dropped: try later, or give another name"
            raise Refusal(Kind.INVALID, line, "lora_name")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._change_adapters(change, done)
        await done

    def _change_adapters(self, change: AdapterChange, done: asyncio.Future[None] | None) -> None:
        self._send(change)
        self._changes.append((change, done))

    def _adapters_in_use(self) -> set[str]:
        return {name for opened in self._requests.values() if (name := opened.request.sampling.lora_name) is not None}

    def _take_change(self, answer: AdapterChanged) -> None:
        """Take the outcome of the first change that was not answered."""
        change, done = self._changes.popleft()
        if done is None:  # nobody has asked for it: an engine is told what the one before had
            self.adapters.note_loaded(change.lora_name)
            if answer.error is not None:
                logger.error("the adapter %s is gone: %s", change.lora_name, answer.error)
                self.adapters.forget(change.lora_name)
            return
        if answer.error is None:
            self.adapters.enter(change)
        if not done.done():
            done.set_exception(Refusal(Kind.INVALID, answer.error)) if answer.error else done.set_result(None)

    def drop(self, cause: str | None = None) -> None:
        """The engine's process has ended: what is left of it, such as ranks without their mpirun, is no longer listened
        to, and ends when it notices. Where a change of adapters was what held it up, `cause` says so."""
        if self._writer is not None:
            self._writer.close()
            self._detach(cause)

    def take_loss(self) -> int | None:
        """The number of the engine that was lost since the last call; None where none was there to be lost."""
        number, self._lost = self._lost, None
        return number

    def give_up_faulty_request(self, engines: Collection[int | None]) -> bool:
        """End the request that was alone in work when each of these engines was lost; whether there is one."""
        faulty = self._attribution.find_faulty_request(engines, self._requests)
        if faulty is not None:
            self._give_up(faulty)
        return faulty is not None

    def close(self) -> None:
        """Ask the engine to end, and listen no more."""
        if self._server is not None:
            self._server.close()
        self._send(Close())

    def _submit(self, opened: OpenRequest) -> None:
        """Send a request to the engine that is there, for the first time or again, with those of this turn."""
        if self._writer is None:
            return  # the next engine is sent all that goes on
        if not self._beginning:
            asyncio.get_running_loop().call_soon(self._send_beginning)
        self._beginning.append(opened)
        self._num_together += len(opened.request.prompt_token_ids) + sum(map(len, opened.generated.values()))
        if self._num_together >= MOST_TOGETHER:
            self._send_beginning()

    def _send_beginning(self) -> None:
        beginning, self._beginning, self._num_together = self._beginning, [], 0
        if not beginning:
            return
        try:
            self._write(encode(Begin(requests=tuple(opened.message() for opened in beginning))))
        except MessageError as error:
            if len(beginning) == 1:
                self._requests.pop(beginning[0].request_id, None)
                beginning[0].inbox.end(_refusal(beginning[0], Kind.TOO_LARGE, str(error)))
                return
            for opened in beginning:
                self._beginning = [opened]
                self._send_beginning()

    def _send(self, message: Message) -> None:
        """Write a message behind the requests before it."""
        self._send_beginning()
        self._write(encode(message))

    def _write(self, data: bytes) -> None:
        if self._writer is not None:
            with suppress(ConnectionError):
                self._writer.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of one engine, from its first message to its end."""
        try:
            messages = MessageStream(reader)
            ready = await messages.read()
            if not isinstance(ready, Ready) or self._writer is not None:
                logger.error("a connection to the engine's socket was no engine's, or came while another one was there")
                return
            if not self.accepts(ready):
                return
            self._attach(ready, writer)
            yield_timer = YieldTimer()
            while (message := await messages.read()) is not None and self._writer is writer:
                if isinstance(message, Deltas):
                    await self._take_deltas(message, writer, yield_timer)
                else:
                    self._take(message)
        except MessageError as error:
            logger.error("%s", error)
        finally:
            if self._writer is writer:
                self._detach()
            writer.close()

    def _attach(self, ready: Ready, writer: asyncio.StreamWriter) -> None:
        self.ready, self.limits, self._writer = ready, ready.scheduler_limits(), writer
        before = self.adapters.names
        for change in self.adapters.changes(self._adapters_in_use()):
            self._send(change)
            self._changes.append((change, None))
        for name in set(before).difference(self.adapters.names):
            logger.error("the adapter %s is gone: its files have changed since it was loaded", name)
        going_on = self._attribution.begin(self._requests)
        for opened in going_on:
            self._submit(opened)
        self.on_ready()

    def _detach(self, cause: str | None = None) -> None:
        self._heartbeat, self._absent_since = None, time.monotonic()
        self.ready = self.limits = self._writer = None
        self._beginning, self._num_together = [], 0
        while self._statuses:
            self._answer_status(None)
        if self._changes:  # the engine was at the first of them
            change, done = self._changes[0]
            if done is None and self.adapters.give_up(change.lora_name, at_once=cause is not None):
                logger.error("the adapter %s is gone: an engine was lost while it loaded it again", change.lora_name)
        line = "the engine was lost meanwhile: send the request again"
        while self._changes:
            _, done = self._changes.popleft()
            if done is not None and not done.done():
                done.set_exception(Refusal(Kind.FAILED, line if cause is None else f"the engine hangs: {cause}"))
            cause = None
        for faulty in self._attribution.lose(self._requests):
            self._give_up(faulty)
        self._lost = self._attribution.engine
        self.on_lost()

    def _give_up(self, faulty: FaultyRequest) -> None:
        """End a request that ends engines."""
        logger.error("a request is given up: %s", faulty.reason)
        for opened in [opened for opened in self._requests.values() if opened.group == faulty.group]:
            del self._requests[opened.request_id]
            opened.inbox.end(Refusal(Kind.FAILED, faulty.reason))
        if faulty.is_certain:
            self.on_faulty_request(faulty.engines)
        else:
            self._suspected_ends |= faulty.engines

    def _go_on_behind(self, request_id: str) -> None:
        """A request has a token, or has ended: another one may have waited for that."""
        opened = self._attribution.next_behind(request_id, self._requests)
        if opened is not None:
            self._submit(opened)

    async def _take_deltas(self, message: Deltas, writer: asyncio.StreamWriter, yield_timer: YieldTimer) -> None:
        """What a round has added; no more once the engine is given up, for the next one begins where this was left."""
        for delta in message.deltas:
            self._take_delta(delta)
            await yield_timer.yield_if_due()
            if self._writer is not writer:
                return

    def _take(self, message: Message) -> None:
        match message:
            case Ended():
                opened = self._requests.pop(message.request_id, None)
                if opened is not None:
                    opened.inbox.end(_refusal(opened, Kind.INVALID, message.error))
                    self._go_on_behind(message.request_id)
            case AdapterChanged():
                self._take_change(message)
            case Status():
                self._answer_status(message)
            case Heartbeat():
                self._heartbeat, self._heard = message, time.monotonic()
                self.on_heartbeat(message)
            case _:
                raise MessageError(f"the engine sent a message that is the front's: {type(message).__name__}")

    def _answer_status(self, status: Status | None) -> None:
        """Answer who has asked first, and still waits."""
        while self._statuses:
            answer = self._statuses.popleft()
            if not answer.done():
                answer.set_result(status)
                return

    def _take_delta(self, delta: CompletionDelta) -> None:
        request_id = str(delta.request_id)
        opened = self._requests.get(request_id)
        if opened is not None and delta.index in opened.generated:
            opened.take(delta)
            if not opened.generated:
                del self._requests[request_id]
            if not has_progress(delta):
                return
            self._go_on_behind(request_id)
            if self._suspected_ends:  # others get on: it was not the engine
                self.on_faulty_request(self._suspected_ends)
                self._suspected_ends = set()


def _refusal(opened: OpenRequest, kind: Kind, error: str) -> Refusal:
    """What is told to the reader of a request that an engine does not take, as of a kind. What was in work before is
    not wrong."""
    if not opened.is_given_back:
        return Refusal(kind, error)
    return Refusal(Kind.FAILED, f"the engine was lost, and the next one does not take the request: {error}")
