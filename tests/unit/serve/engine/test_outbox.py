"""The engine's way out to the frontend: one message a round, and no waiting for a frontend that does not read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from engine_messages import delta_of, run

from launch.serve.engine.messages import Abort, Deltas, Ended, Message, MessageStream
from launch.serve.engine.outbox import Outbox, Sending
from trtrun.api.engine_thread import flush
from trtrun.core.outputs import CompletionDelta, Logits
from trtrun.errors import InvalidRequestError, RankFailedError

Check = Callable[[Outbox, MessageStream, socket.socket], Coroutine[Any, Any, None]]


def with_outbox(check: Check) -> None:
    async def work() -> None:
        own, fronts = socket.socketpair()
        for end in (own, fronts):
            end.setblocking(False)
        outbox = Outbox(own, asyncio.get_running_loop())
        reader, writer = await asyncio.open_connection(sock=fronts)
        try:
            await check(outbox, MessageStream(reader), own)
        finally:
            outbox.close()
            writer.close()

    run(work())


def test_logits_are_messages_of_their_own() -> None:
    async def check(outbox: Outbox, messages: MessageStream, own: socket.socket) -> None:
        recipients = [sending(outbox, name, n=1) for name in ("a", "b", "c")]
        of_all = [of_request(name, delta_of((1,), "stop")) for name in ("a", "b", "c")]
        of_all[0] = msgspec.structs.replace(of_all[0], generation_logits=Logits(2, (bytes(8),)))
        for recipient, delta in zip(recipients, of_all, strict=True):
            recipient.put(delta)
        flush(recipients)
        assert await read_deltas(messages) == of_all[:1]
        assert await read_deltas(messages) == of_all[1:]

    with_outbox(check)


class CountingSocket:
    """A connection that counts what is written to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.num_sends = 0
        self.fileno, self.close = connection.fileno, connection.close
        self._connection = connection

    def send(self, data: memoryview) -> int:
        self.num_sends += 1
        return self._connection.send(data)


def sending(outbox: Outbox, name: str, failures: list[RankFailedError] | None = None, n: int = 1) -> Sending:
    recipient = Sending(outbox, name, [].append if failures is None else failures.append)
    recipient.begin(n)
    return recipient


def of_request(name: str, delta: CompletionDelta) -> CompletionDelta:
    return msgspec.structs.replace(delta, request_id=name)


async def read_deltas(messages: MessageStream) -> list[CompletionDelta]:
    message = await messages.read()
    assert isinstance(message, Deltas)
    return list(message.deltas)


def test_a_round_is_one_message_in_the_order_of_its_rows() -> None:
    async def check(outbox: Outbox, messages: MessageStream, own: socket.socket) -> None:
        recipients = [sending(outbox, name, n=2) for name in ("a", "b")]
        first = [of_request("a", delta_of((1,))), of_request("b", delta_of((2, 3), "stop", index=1))]
        for recipient, delta in zip(recipients, first, strict=True):
            recipient.put(delta)
        flush(recipients)
        assert await read_deltas(messages) == first
        assert not recipients[1].is_over
        # Counters are those of the round, though they go on.
        last = of_request("b", delta_of((4,), "length"))
        recipients[1].put(last)
        flush(recipients)
        last.statistics.num_rounds += 5
        (told,) = await read_deltas(messages)
        assert told.statistics.num_rounds == 1 and recipients[1].is_over

    with_outbox(check)


def test_what_a_front_does_not_read_becomes_one_delta_a_completion() -> None:
    async def check(outbox: Outbox, messages: MessageStream, own: socket.socket) -> None:
        recipient = sending(outbox, "a", n=2)
        rounds = 0
        while not outbox._late:  # until the kernel takes no more
            recipient.put(of_request("a", delta_of((rounds,) * 500, rounds=rounds)))
            flush([recipient])
            rounds += 1
        for number in range(50):
            delta = of_request("a", delta_of((number,), index=1, rounds=1))
            recipient.put(delta)
            flush([recipient])
            delta.statistics.num_rounds += 100  # the engine counts on
        outbox.send(Ended(request_id="b", error="no"))
        told: list[CompletionDelta] = []
        while not isinstance(message := await messages.read(), Ended):
            assert isinstance(message, Deltas)
            told += message.deltas
        tokens = [token for delta in told if delta.index == 0 for token in delta.token_ids]
        assert tokens == [number for number in range(rounds) for _ in range(500)]
        (late,) = [delta for delta in told if delta.index == 1]
        assert late.token_ids == tuple(range(50)) and late.statistics.num_rounds == 1
        # And on it goes, a message a round.
        recipient.put(of_request("a", delta_of((7,))))
        flush([recipient])
        assert [delta.token_ids for delta in await read_deltas(messages)] == [(7,)]

    with_outbox(check)


def test_what_waits_of_an_aborted_request_is_not_sent() -> None:
    async def check(outbox: Outbox, messages: MessageStream, own: socket.socket) -> None:
        recipients = {name: sending(outbox, name) for name in ("a", "b")}
        while not outbox._late:
            recipients["a"].put(of_request("a", delta_of((1,) * 500)))
            flush([recipients["a"]])
        recipients["b"].put(of_request("b", delta_of((2,))))
        flush([recipients["b"]])
        recipients["a"].end()
        outbox.send(Abort(request_id="last"))
        last: Message | None = None
        while not isinstance(message := await messages.read(), Abort):
            last = message
        assert isinstance(last, Deltas) and [delta.request_id for delta in last.deltas] == ["b"]

    with_outbox(check)


def test_refusals_are_told_and_failures_are_heard() -> None:
    async def check(outbox: Outbox, messages: MessageStream, own: socket.socket) -> None:
        failures: list[RankFailedError] = []
        sending(outbox, "a", failures).end(InvalidRequestError("too long"))
        assert await messages.read() == Ended(request_id="a", error="too long")
        failure = RankFailedError("rank 1 failed")
        sending(outbox, "b", failures).end(failure)
        assert failures == [failure]

    with_outbox(check)


def test_a_front_that_is_gone_is_written_to_no_more() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        unhandled: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, told: unhandled.append(told))
        own, fronts = socket.socketpair()
        own.setblocking(False)
        counted = CountingSocket(own)
        outbox = Outbox(counted, loop)  # type: ignore[arg-type]
        recipient = sending(outbox, "a")

        def put_and_send() -> None:
            recipient.put(of_request("a", delta_of((1,))))
            flush([recipient])
            outbox.send(Abort(request_id="a"))

        put_and_send()
        assert counted.num_sends == 2
        fronts.close()
        put_and_send()  # the first of these hears that the frontend is gone
        put_and_send()
        assert counted.num_sends == 3
        outbox.close()
        put_and_send()
        assert counted.num_sends == 3 and own.fileno() == -1
        await asyncio.sleep(0)
        assert not unhandled

    run(work())
