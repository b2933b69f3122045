"""Requests that outlive engines. The engines here speak the protocol and compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from engine_messages import LIMITS, SAMPLING, delta_of, run

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.engine import handshake as engine_socket
from launch.serve.engine.client import MOST_TOGETHER, EngineClient
from launch.serve.engine.messages import (
    Abort,
    AskStatus,
    Begin,
    Deltas,
    Ended,
    Generate,
    Message,
    MessageStream,
    Ready,
    Status,
    encode,
)
from launch.serve.engine.open_requests import EngineRequest, Inbox
from trtrun.core.outputs import CompletionDelta, Logits


class Engine:
    """The engine's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._messages, self.writer = MessageStream(reader), writer
        self._unheard: list[Generate] = []

    @classmethod
    async def connect(cls, socket: str) -> Engine:
        engine = cls(*await asyncio.open_unix_connection(sock=engine_socket.connect(socket)))
        engine.send(Ready(version="1", config_hash="h", limits=asdict(LIMITS)))
        return engine

    def send(self, message: Message) -> None:
        self.writer.write(encode(message))

    def tell(self, *deltas: CompletionDelta) -> None:
        self.send(Deltas(deltas=deltas))

    async def hear(self) -> Any:
        """The next message, or the next request of one."""
        if not self._unheard:
            message = await self._messages.read()
            if not isinstance(message, Begin):
                return message
            self._unheard += message.requests
        return self._unheard.pop(0)

    async def hear_ids(self) -> list[str]:
        """Those of the requests that are sent as one."""
        message = await self._messages.read()
        assert isinstance(message, Begin)
        return [request.request_id for request in message.requests]

    async def die(self, client: EngineClient) -> None:
        self.writer.close()
        while client.ready is not None:
            await asyncio.sleep(0)


def with_client(check: Callable[[EngineClient, str], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        client, socket = EngineClient(), engine_socket.make_name()
        await client.listen(socket)
        try:
            await check(client, socket)
        finally:
            client.close()

    run(work())


def test_a_request_goes_to_the_next_engine_with_its_tokens() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        inbox = Inbox()
        client.start([EngineRequest((1, 2), SAMPLING)], inbox)  # before there is an engine
        first = await Engine.connect(socket)
        asked = await first.hear()
        assert asked.generated is None and asked.sampling_params() == SAMPLING
        first.tell(delta_of((3, 4)))
        first.tell(delta_of((5,), "stop", index=1))
        assert {delta.index for _, delta in await inbox.take()} <= {0, 1}
        first.tell(delta_of((6,), rounds=3))
        while client._requests["request 0"].generated != {0: [3, 4, 6]}:
            await asyncio.sleep(0)
        await first.die(client)
        second = await Engine.connect(socket)
        asked = await second.hear()
        assert asked.generated == {0: (3, 4, 6)}  # the other completion has ended
        second.tell(delta_of((7,), "length", rounds=2))
        while client.num_requests:
            await asyncio.sleep(0)
        (last,) = [delta for _, delta in await inbox.take() if delta.index == 0]
        assert last.token_ids[-1] == 7 and last.finish_reason == "length"
        # Counters go on, though the second engine began at zero.
        assert last.statistics.num_rounds == last.statistics.num_drafts == 3 + 2
        assert last.statistics.acceptance_histogram == [0, 5]
        assert last.statistics.num_draft_tokens == 8
        assert last.statistics.num_suffix_draft_tokens == 6 and last.statistics.num_accepted_suffix_draft_tokens == 2
        second.writer.close()

    with_client(check)


def test_a_request_that_ends_engines_is_ended() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        inboxes = [Inbox(), Inbox()]
        for inbox in inboxes:
            client.start([EngineRequest((1,), SAMPLING)], inbox)
        for number in range(3):
            engine = await Engine.connect(socket)
            assert {(await engine.hear()).request_id for _ in range(2)} == {"request 0", "request 1"}
            engine.tell(delta_of((3 + number,)))  # request 0 gets on, the other does not
            await inboxes[0].take()
            await engine.die(client)
        with pytest.raises(Refusal, match="ended 3 times in a row") as caught:
            await inboxes[1].take()
        assert caught.value.kind is Kind.FAILED
        assert client.num_requests == 1

    with_client(check)


def test_the_next_suspect_waits_for_a_token_of_the_one_before_and_not_for_logits_of_its_prompt() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        blamed: list[int] = []
        client.on_faulty_request = blamed.extend
        inboxes = [Inbox(), Inbox()]
        for inbox in inboxes:
            client.start([EngineRequest((1,), SAMPLING)], inbox)
        logits = msgspec.structs.replace(delta_of(()), context_logits=Logits(1, (b"\0" * 4,)))
        for _ in range(2):
            engine = await Engine.connect(socket)
            assert await engine.hear_ids() == ["request 0", "request 1"]
            await engine.die(client)
        third = await Engine.connect(socket)
        assert await third.hear_ids() == ["request 0"]
        third.tell(logits)
        (told,) = await inboxes[0].take()
        assert told[1].context_logits is not None
        await third.die(client)
        with pytest.raises(Refusal, match="ended 3 times in a row"):
            await inboxes[0].take()
        fourth = await Engine.connect(socket)
        assert await fourth.hear_ids() == ["request 1"] and client.num_requests == 1 and not blamed
        fourth.tell(msgspec.structs.replace(logits, request_id="request 1"))
        await inboxes[1].take()
        assert not blamed, "whether the engine is one that works is not known yet"
        fourth.tell(delta_of((4,), request_id="request 1"))
        await inboxes[1].take()
        assert sorted(blamed) == [1, 2, 3]
        fourth.writer.close()

    with_client(check)


def test_aborted_and_refused_requests_are_not_given_back() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        engine = await Engine.connect(socket)
        while client.ready is None:
            await asyncio.sleep(0)
        inboxes = [Inbox(), Inbox()]
        ids = [client.start([EngineRequest((1,), SAMPLING)], inbox)[0] for inbox in inboxes]
        assert [type(await engine.hear()) for _ in ids] == [Generate, Generate]
        client.abort([ids[0], "unknown"])
        assert await engine.hear() == Abort(request_id=ids[0])
        engine.send(Ended(request_id=ids[1], error="too long"))
        with pytest.raises(Refusal, match="too long"):
            await inboxes[1].take()
        await engine.die(client)
        assert client.num_requests == 0

    with_client(check)


def test_only_one_engine_is_listened_to_and_it_has_to_speak_the_protocol() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=engine_socket.connect(socket))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b"" and client.ready is None
        first = await Engine.connect(socket)
        while client.ready is None:
            await asyncio.sleep(0)
        second = await Engine.connect(socket)
        assert await second.hear() is None
        assert client.ready is not None
        inbox = Inbox()
        client.start([EngineRequest((1,), SAMPLING)], inbox)
        client.drop()  # its process has ended, though something still speaks
        first.tell(delta_of((3,)))
        third = await Engine.connect(socket)
        assert (await third.hear()).generated is None
        third.tell(delta_of((4,)))
        assert [delta.token_ids for _, delta in await inbox.take()] == [(4,)]
        third.writer.close()

    with_client(check)


def test_an_engine_that_is_not_accepted_gets_nothing() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        client.start([EngineRequest((1,), SAMPLING)], Inbox())
        client.accepts = lambda ready: ready.config_hash == "other"
        engine = await Engine.connect(socket)
        assert await engine.hear() is None and client.ready is None and client.num_requests == 1

    with_client(check)


def test_a_slow_reader_gets_one_delta_a_completion() -> None:
    async def check() -> None:
        inbox = Inbox()
        for token in range(50):
            inbox.put(1, delta_of((token,)))
        inbox.put(0, delta_of((7,)))
        inbox.end(Refusal(Kind.TIMEOUT, "late"))
        inbox.end(Refusal(Kind.FAILED, "later"))
        taken = dict(await inbox.take())
        assert taken[1].token_ids == tuple(range(50)) and len(taken[1].logprobs or ()) == 50
        assert taken[0].token_ids == (7,)
        for _ in range(2):
            with pytest.raises(Refusal, match="late"):
                await inbox.take()

    run(check())


def test_requests_that_came_together_are_a_group_on_every_engine() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        inbox = Inbox()
        client.start([EngineRequest((number,), SAMPLING) for number in range(3)], inbox)
        client.start([EngineRequest((7,), SAMPLING)], inbox)
        for _ in range(2):
            engine = await Engine.connect(socket)
            groups = [(await engine.hear()).group for _ in range(4)]
            assert groups[0] == groups[1] == groups[2] != groups[3] and None not in groups
            await engine.die(client)

    with_client(check)


def test_an_engine_hears_which_requests_begin_together() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        engine = await Engine.connect(socket)
        while client.ready is None:
            await asyncio.sleep(0)
        client.start([EngineRequest((number,), SAMPLING) for number in range(2)], Inbox())
        client.start([EngineRequest((number,), SAMPLING) for number in range(2)], Inbox())
        assert await engine.hear_ids() == [f"request {number}" for number in range(4)]
        await engine.die(client)
        engine = await Engine.connect(socket)
        assert await engine.hear_ids() == [f"request {number}" for number in range(4)]

    with_client(check)


def test_who_asks_how_full_the_engine_is_hears_it_or_that_there_is_none() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        assert await client.ask_status() is None
        engine = await Engine.connect(socket)
        while client.ready is None:
            await asyncio.sleep(0)
        asked = [asyncio.create_task(client.ask_status()) for _ in range(3)]
        for _ in asked:
            assert isinstance(await engine.hear(), AskStatus)
        asked[0].cancel()
        engine.send(status := Status(num_running=1, num_waiting=2, num_free_blocks=3, num_blocks=4, totals={}))
        assert await asked[1] == status
        await engine.die(client)
        assert await asked[2] is None
        with pytest.raises(asyncio.CancelledError):  # who gives up is not answered
            await asked[0]

    with_client(check)


def test_requests_that_follow_each_other_are_written_together() -> None:
    async def check(client: EngineClient, socket: str) -> None:
        engine = await Engine.connect(socket)
        while client.ready is None:
            await asyncio.sleep(0)
        assert client._writer is not None
        write, written = client._writer.write, list[bytes]()
        client._writer.write = lambda data: (written.append(data), write(data))[1]  # type: ignore[assignment, method-assign]
        for _ in range(3):
            client.start([EngineRequest((1,), SAMPLING)], Inbox())
        assert not written
        assert await engine.hear_ids() == ["request 0", "request 1", "request 2"]
        assert len(written) == 1
        # One behind which nothing comes after all, and one whose follower ends it, in their order.
        client.start([EngineRequest((1,), SAMPLING)], Inbox())
        assert await engine.hear_ids() == ["request 3"]
        client.start([EngineRequest((1,), SAMPLING)], Inbox())
        client.abort(["request 4"])
        assert [type(await engine.hear()) for _ in range(2)] == [Generate, Abort]
        # Those with many tokens are not held until the last.
        client.start([EngineRequest((1,) * (MOST_TOGETHER // 2), SAMPLING)] * 8, Inbox())
        assert len(written) == 1 + 1 + 2 + 4
        assert [len(await engine.hear_ids()) for _ in range(4)] == [2] * 4
        engine.writer.close()

    with_client(check)
