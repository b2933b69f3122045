"""Asking an engine how full it is holds up nothing else, and nobody waits for it for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import LIMITS

from launch.serve.engine import client as engine_client
from launch.serve.engine import process
from launch.serve.engine.client import EngineClient
from launch.serve.engine.messages import Abort, AskStatus, Close, Message, Ready
from launch.serve.engine.own_engine import OwnEngine
from launch.serve.engine.process import _Served
from launch.serve.engine.restarted_engine import EngineEvents
from parallel.watchdog.activity import Doing, Phase
from trtrun.configuration.config import make_config
from trtrun.start.job_spec import JobSpec


class LongRound:
    """An AsyncLLM in a round: what is asked of the engine is answered when the round is over."""

    config = make_config(
        {"target": {"model": "asset:target", "devices": ["cpu:0", "cpu:1"]}, "speculation": {"method": "none"}}
    )

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.aborted: list[str] = []

    async def call(self, work: Any) -> str:
        await self.is_over.wait()
        return "status"

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def describe(llm: Any, begun: float) -> Ready:
    return Ready(version="1", config_hash="h", limits=asdict(LIMITS))


class Sent:
    """An outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.has_some = asyncio.Event()

    def send(self, message: Any) -> None:
        self.messages.append(message)
        self.has_some.set()


async def messages() -> AsyncIterator[Message]:
    for message in (AskStatus(), AskStatus(), Abort(request_id="a"), Close()):
        yield message


def test_what_comes_behind_a_question_does_not_wait_for_the_answer() -> None:
    async def work() -> None:
        llm, outbox = LongRound(), Sent()
        served = _Served(llm, outbox)  # type: ignore[arg-type]
        await served._read(messages())  # type: ignore[arg-type]
        assert llm.aborted == ["a"] and not outbox.messages
        llm.is_over.set()
        await asyncio.gather(*served._telling)
        assert outbox.messages == ["status", "status"]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_engine_in_a_long_round_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(process, "describe_engine", describe)

    async def work() -> None:
        client, llm = EngineClient(), LongRound()
        fronts, own = socket.socketpair()
        hearing = asyncio.create_task(client.serve(*await asyncio.open_unix_connection(sock=fronts)))
        serving = asyncio.create_task(process.serve_frontend(llm, own))  # type: ignore[arg-type]
        while client.ready is None:
            await asyncio.sleep(0)
        assert await client.ask_status() is None
        client.close()
        await asyncio.gather(serving, hearing)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_engine_in_this_process_that_hangs_is_told_of_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        doing = Doing(Phase.VERIFYING, 8, still_seconds=60.0)
        llm: Any = LongRound()
        llm.engine = SimpleNamespace(orchestrator=SimpleNamespace(look=lambda: {0: doing}))
        llm.close = lambda: None
        llm.config = config = make_config(
            {
                "target": {"model": "asset:target", "devices": ["cpu:0"]},
                "speculation": {"method": "none"},
                "launch": {"heartbeat_seconds": 0.5},
            }
        )
        engine = OwnEngine(JobSpec(config))
        monkeypatch.setattr(engine, "_open", lambda: llm)
        monkeypatch.setattr(process, "describe_engine", describe)
        said: asyncio.Queue[str] = asyncio.Queue()

        def say(word: str) -> Callable[[], None]:
            return lambda: said.put_nowait(word)

        events = EngineEvents(say("ready"), say("lost"), said.put_nowait, say("gets on"), *[said.put_nowait] * 3)
        keeping = asyncio.create_task(engine.keep(events))
        assert await said.get() == "ready"
        assert "it stands still in round 8 (verifying) for longer than 0.5 s" in await said.get()
        doing = Doing(Phase.VERIFYING, 9)
        assert await said.get() == "gets on"
        await engine.close()
        assert await keeping == 0 and await said.get() == "lost"

    asyncio.run(asyncio.wait_for(work(), 60))
