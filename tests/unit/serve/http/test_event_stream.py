"""Server-sent events: written as they come, ended with their client, with comments while nothing comes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from engine_messages import run

from launch.serve.http.answers import EventStream, LastEvents, event


class Work:
    """A request at work, and what its client sees."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_gone = asyncio.Event()
        self.sent: list[Any] = []
        self.has_sent = asyncio.Event()

    def close(self) -> None:
        self.is_closed = True

    async def receive(self) -> Any:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.has_sent.set()

    async def answer(self, events: AsyncGenerator[bytes, None], ping_seconds: float | None = None) -> None:
        await EventStream(self.close, events, ping_seconds)({"type": "http"}, self.receive, self.send)


def test_events_are_sent_as_they_are_and_the_last_ones_with_the_end() -> None:
    async def check() -> None:
        async def events(has_last: bool) -> AsyncGenerator[bytes, None]:
            yield event(b'{"a":1}') + event("é")
            if has_last:
                yield LastEvents(event("[DONE]"))

        for has_last in (True, False):
            work = Work()
            await work.answer(events(has_last))
            start, *bodies = work.sent
            assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
            assert start["status"] == 200 and work.is_closed
            assert [(body["body"], body["more_body"]) for body in bodies] == [
                ('data: {"a":1}\n\ndata: é\n\n'.encode(), True),
                (b"data: [DONE]\n\n" if has_last else b"", False),
            ]

    run(check())


def test_streams_that_end_together_have_their_ends_before_the_first_is_put_away() -> None:
    async def check() -> None:
        ends = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await ends.wait()
            yield LastEvents(event("1"))

        class LookingWork(Work):
            def close(self) -> None:
                super().close()
                sent_when_closed.append([len(work.sent) for work in works])

        works = [LookingWork() for _ in range(3)]
        sent_when_closed: list[list[int]] = []
        answering = asyncio.gather(*(work.answer(events()) for work in works))
        while not all(work.sent for work in works):
            await asyncio.sleep(0)
        ends.set()
        await answering
        assert sent_when_closed == [[2, 2, 2]] * 3

    run(check())


def test_a_stream_ends_with_its_client() -> None:
    async def check() -> None:
        has_ended = False

        async def events() -> AsyncGenerator[bytes, None]:
            nonlocal has_ended
            try:
                yield event("1")
                await asyncio.Event().wait()
            finally:
                has_ended = True

        work = Work()
        answering = asyncio.create_task(work.answer(events()))
        while len(work.sent) < 2:
            await asyncio.sleep(0)
        work.is_gone.set()
        await asyncio.wait((answering,), timeout=30)
        assert answering.done() and has_ended and work.is_closed
        answering.result()

    run(check())


def test_a_stream_that_is_cancelled_lets_its_request_go() -> None:
    async def check() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            await asyncio.Event().wait()
            yield b""

        work = Work()
        answering = asyncio.create_task(work.answer(events()))
        await work.has_sent.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert work.is_closed

    run(check())


class NextTimer(selectors.DefaultSelector):
    """In place of waiting for the next timer its time comes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will happen any more"
        self.now += timeout
        return super().select(0)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time goes on where nothing else is to be done."""

    def __init__(self) -> None:
        self._timers = NextTimer()
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.now


class TimedWork(Work):
    """Keeps when each part begins to be sent, which takes some time, and that they come one behind the other."""

    def __init__(self, seconds_to_send: float) -> None:
        super().__init__()
        self._seconds_to_send = seconds_to_send
        self._is_sending = False
        self.times: list[tuple[float, bytes]] = []

    async def send(self, message: Any) -> None:
        assert not self._is_sending
        if message["type"] == "http.response.body":
            self.times.append((asyncio.get_running_loop().time(), message["body"].strip()))
            self._is_sending = True
            await asyncio.sleep(self._seconds_to_send)
            self._is_sending = False


def times_of(waits: list[float], seconds_to_send: float, ping_seconds: float | None) -> list[tuple[float, bytes]]:
    """When the parts of a stream begin to be sent, each of whose events comes so long after the one before is sent."""

    async def events() -> AsyncGenerator[bytes, None]:
        for wait in waits:
            await asyncio.sleep(wait)
            yield event("1")

    work = TimedWork(seconds_to_send)
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        runner.run(work.answer(events(), ping_seconds))
    return work.times


PING, EVENT = b": ping", b"data: 1"


def test_no_silence_is_longer_than_is_asked_for() -> None:
    told = times_of([1.0, 0.5, 5.0, 0.0], 0.0, 2.0)
    assert told == [(1.0, EVENT), (1.5, EVENT), (3.5, PING), (5.5, PING), (6.5, EVENT), (6.5, EVENT), (6.5, b"")]
    assert times_of([3.0], 0.0, 2.0) == [(2.0, PING), (3.0, EVENT), (3.0, b"")]
    assert times_of([9.0], 0.0, None) == [(9.0, EVENT), (9.0, b"")]


def test_one_part_is_sent_behind_the_other_however_slowly_the_client_reads() -> None:
    # No comment while an event is sent; one that is being sent goes first; silence begins where a part is sent.
    told = times_of([1.0, 3.0, 0.0], 5.0, 2.0)
    assert told == [(1.0, EVENT), (8.0, PING), (13.0, EVENT), (18.0, EVENT), (23.0, b"")]
