"""Server-sent events: written as they come, ended with their client, with comments while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from engine_messages import run

from launch.serve import event_stream
from launch.serve.event_stream import EventStream, LastEvents, event


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

    async def answer(self, events: AsyncGenerator[bytes, None]) -> None:
        await EventStream(self, events)({"type": "http"}, self.receive, self.send)


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


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(event_stream, "PING_SECONDS", 0.001)
        goes_on = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await goes_on.wait()
            yield LastEvents(event("1"))

        work = Work()
        answering = asyncio.create_task(work.answer(events()))
        while len(work.sent) < 3:
            work.has_sent.clear()
            await work.has_sent.wait()
        goes_on.set()
        await answering
        bodies = [message["body"] for message in work.sent[1:]]
        assert set(bodies[:-1]) == {b": ping\n\n"} and bodies[-1] == b"data: 1\n\n"

    run(check())
