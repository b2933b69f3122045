"""The engine's side of the socket: a rank that has failed, and signs of life."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import run

from launch.serve.engine.messages import Beat, Message
from launch.serve.engine.process import _Served
from parallel.watchdog.activity import Doing, Phase
from trtrun.errors import RankFailedError


class Sent:
    """Keeps what goes out."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def offer(self, message: Message) -> None:
        self.messages.put_nowait(message)


@pytest.mark.parametrize(
    ("doing", "beat", "is_shown"),
    [
        (Doing(Phase.IDLE, 7, still_seconds=99.0), Beat(doing="idle after round 7", still_seconds=None), False),
        (Doing(Phase.VERIFYING, 8, 9.0), Beat(doing="in round 8 (verifying)", still_seconds=9.0), False),
        (Doing(Phase.VERIFYING, 8, 11.0), Beat(doing="in round 8 (verifying)", still_seconds=11.0), True),
    ],
)
def test_an_engine_tells_what_its_rounds_are_doing(
    doing: Doing, beat: Beat, is_shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    llm: Any = SimpleNamespace(
        config=SimpleNamespace(launch=SimpleNamespace(heartbeat_seconds=10.0)),
        engine=SimpleNamespace(orchestrator=SimpleNamespace(look=lambda: doing)),
    )

    async def work() -> None:
        sent: Any = Sent()
        beating = asyncio.create_task(_Served(llm, sent)._beat())
        assert await sent.messages.get() == beat
        beating.cancel()

    run(work())
    assert ("most recent call first" in capfd.readouterr().err) is is_shown


def test_a_failure_that_comes_when_the_event_loop_is_over_stops_no_thread() -> None:
    """Each request is told of it, in the engine's thread; the first of them ends the loop."""
    nothing: Any = None

    async def work() -> _Served:
        return _Served(nothing, nothing)

    asyncio.run(work())._hear_failure(RankFailedError("target rank 2 failed"))
