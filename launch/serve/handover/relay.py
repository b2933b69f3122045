"""The side of the server that follows: it answers the messages of the server before as an engine does, and has its own
engine do what they ask for.

Requests of the server before were let in there: here they are counted, and not refused. It does not know where they
came from, or how engines are started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from launch.serve.admission.control import AdmissionControl
from launch.serve.admission.refusals import Refusal
from launch.serve.engine.client import EngineClient
from launch.serve.engine.messages import (
    Abort,
    AdapterChanged,
    AskStatus,
    Begin,
    Close,
    Deltas,
    DropAdapter,
    Ended,
    Generate,
    LoadAdapter,
    Message,
    MessageError,
    MessageStream,
    Ready,
    encode,
)
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.handover.door import Streams


@dataclass(eq=False)
class _Relayed:
    """Requests that came together.

    Attributes:
        client: that has them completed.
        ids: of each request, here, by what the server before calls it.
        going_on: completions that go on, by what the server before calls their request.
        task: that waits for what comes of them.
    """

    client: EngineClient
    ids: dict[str, str]
    going_on: set[tuple[str, int]]
    task: asyncio.Task[None] | None

    def abort(self, request_id: str) -> None:
        """The server before has no use for one any more."""
        self.client.abort([self.ids[request_id]])
        self.going_on = {one for one in self.going_on if one[0] != request_id}
        if not self.going_on and self.task is not None:
            self.task.cancel()


class Relay:
    """Serves the server before over one connection."""

    def __init__(self, client: Callable[[], EngineClient], admission: AdmissionControl, streams: Streams) -> None:
        """Serve nothing yet.

        Args:
            client: the engine of this server, as it is now.
            admission: that counts requests.
            streams: of the connection.
        """
        self._client, self._admission = client, admission
        self._reader, self._writer = streams
        self._relayed: dict[str, _Relayed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes = asyncio.Lock()

    async def run(self, ready: Ready) -> None:
        """Serve until either side ends the connection.

        Args:
            ready: what the own engine has said of itself.
        """
        self._send(ready)
        try:
            with suppress(MessageError):
                async for message in MessageStream(self._reader):
                    if isinstance(message, Close):
                        break
                    self._take(message)
        finally:
            self.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End the connection; the server before goes on with its requests by itself."""
        self._writer.close()
        for task in self._tasks:
            task.cancel()

    def _take(self, message: Message) -> None:
        match message:
            case Begin():
                for _, group in groupby(message.requests, lambda request: request.group or request.request_id):
                    self._do(self._complete(list(group)))
            case Abort():
                relayed = self._relayed.pop(message.request_id, None)
                if relayed is not None:
                    relayed.abort(message.request_id)
            case AskStatus():
                self._do(self._tell_status())
            case LoadAdapter() | DropAdapter():
                self._do(self._change_adapters(message))
            case _:
                raise MessageError(f"the server before sent a message that is an engine's: {type(message).__name__}")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete(self, group: Sequence[Generate]) -> None:
        """Requests that came together, each from its start or behind the tokens that it has."""
        names = [request.request_id for request in group]
        requests = [
            EngineRequest(one.prompt_token_ids, one.sampling_params(), one.owner, one.generated) for one in group
        ]
        going_on = {(name, index) for name, one in zip(names, requests, strict=True) for index in one.going_on()}
        ticket = self._admission.take_over(len(going_on), group[0].owner or "")
        client, inbox = self._client(), Inbox(ticket.end_completion)
        ids = dict(zip(names, client.start(requests, inbox), strict=True))
        relayed = _Relayed(client, ids, going_on, asyncio.current_task())
        self._relayed |= dict.fromkeys(names, relayed)
        try:
            while relayed.going_on:
                news = [msgspec.structs.replace(delta, request_id=names[place]) for place, delta in await inbox.take()]
                relayed.going_on -= {(str(one.request_id), one.index) for one in news if one.finish_reason is not None}
                self._send(Deltas(deltas=tuple(news)))
                await self._writer.drain()  # one that reads slowly gets fewer and larger deltas
        except Refusal as error:
            for name in names:
                self._send(Ended(request_id=name, error=str(error)))
        except ConnectionError:
            pass  # the server before has gone, and `run` ends
        finally:
            client.abort(list(ids.values()))
            ticket.leave()
            for name in names:
                self._relayed.pop(name, None)

    async def _tell_status(self) -> None:
        status = await self._client().ask_status()
        if status is not None:
            self._send(status)

    async def _change_adapters(self, change: LoadAdapter | DropAdapter) -> None:
        """Do what the server before has done, in its order."""
        async with self._changes:
            client, error = self._client(), None
            known = client.adapters.offered.get(change.lora_name)
            has_it = known is not None and isinstance(change, LoadAdapter) and known.path == Path(change.path)
            if not has_it:
                try:
                    await client.change_adapters(change)
                except Refusal as refusal:
                    error = str(refusal)
            self._send(AdapterChanged(error=error))

    def _send(self, message: Message) -> None:
        with suppress(ConnectionError):
            self._writer.write(encode(message))
