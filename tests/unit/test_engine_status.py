"""Asking an engine how full it is holds up nothing else, and nobody waits for it for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from launch.serve import engines
from launch.serve.engine_process import _Served
from launch.serve.messages import Abort, Alive, AskAlive, AskStatus, Close, Message
from launch.serve.own_engine import OwnEngine


class LongRound:
    """An AsyncLLM in a round: what is asked of the engine is answered when the round is over."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.aborted: list[str] = []
        self.engine = SimpleNamespace(unwatched_seconds=2.5)

    async def call(self, work: Any) -> str:
        await self.is_over.wait()
        return "status"

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Sent:
    """An outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.has_some = asyncio.Event()

    def send(self, message: Any) -> None:
        self.messages.append(message)
        self.has_some.set()


async def messages() -> AsyncIterator[Message]:
    for message in (AskStatus(), AskStatus(), AskAlive(), Abort(request_id="a"), Close()):
        yield message


def test_what_comes_behind_a_question_does_not_wait_for_the_answer() -> None:
    async def work() -> None:
        llm, outbox = LongRound(), Sent()
        served = _Served(llm, outbox)  # type: ignore[arg-type]
        await served._read(messages())  # type: ignore[arg-type]
        assert llm.aborted == ["a"] and outbox.messages == [Alive(unwatched_seconds=2.5)]
        llm.is_over.set()
        await asyncio.gather(*served._telling)
        assert outbox.messages[1:] == ["status", "status"]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_engine_in_this_process_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "STATUS_SECONDS", 0.0)

    async def work() -> None:
        config: Any = None  # it is read when the engine is opened
        engine = OwnEngine(config)
        engine._llm, engine.ready = LongRound(), object()  # type: ignore[assignment]
        assert await engine.ask_status() is None

    asyncio.run(asyncio.wait_for(work(), 60))
