"""The engine's side of the socket: a rank that has failed, and signs of life."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import run

from launch.serve.engine.messages import Heartbeat, Message
from launch.serve.engine.process import _Served
from parallel.watchdog.activity import Beside, Doing, Phase
from trtrun.configuration.config import make_config
from trtrun.errors import RankFailedError


class Sent:
    """Keeps what goes out."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def offer(self, message: Message) -> None:
        self.messages.put_nowait(message)


BESIDE = Beside("adapters", "loading adapter 'x'", 301.0, 400.0, 300.0)


@pytest.mark.parametrize(
    ("doing", "told", "is_shown"),
    [
        (Doing(Phase.IDLE, 7, still_seconds=99.0), [("idle", "idle after round 7", 99.0, None)], False),
        (Doing(Phase.IDLE, 7, 9.0, ticks=True), [("idle", "idle after round 7", 9.0, 10.0)], False),
        (Doing(Phase.IDLE, 7, 11.0, ticks=True), [("idle", "idle after round 7", 11.0, 10.0)], True),
        (Doing(Phase.VERIFYING, 8, 9.0), [("round", "in round 8 (verifying)", 9.0, 10.0)], False),
        (Doing(Phase.VERIFYING, 8, 11.0), [("round", "in round 8 (verifying)", 11.0, 10.0)], True),
        (Doing(Phase.ORDERED, 8, 11.0), [("orders", "doing what was asked between rounds", 11.0, 10.0)], True),
        (
            Doing(Phase.VERIFYING, 8, 9.0, beside=(BESIDE,)),
            [("round", "in round 8 (verifying)", 9.0, 10.0), ("adapters", "in loading adapter 'x'", 301.0, 300.0)],
            True,
        ),
    ],
)
def test_an_engine_tells_where_its_threads_stand(
    doing: Doing, told: list[Any], is_shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    llm: Any = SimpleNamespace(
        config=make_config(
            {
                "target": {"model": "asset:target", "devices": ["cpu:0"]},
                "speculation": {"method": "none"},
                "launch": {"heartbeat_seconds": 10.0},
            }
        ),
        engine=SimpleNamespace(orchestrator=SimpleNamespace(look=lambda: {0: doing})),
    )

    async def work() -> None:
        sent: Any = Sent()
        beating = asyncio.create_task(_Served(llm, sent)._send_heartbeats())
        heartbeat = await sent.messages.get()
        assert isinstance(heartbeat, Heartbeat)
        assert [(one.phase, one.doing, one.still_seconds, one.limit) for one in heartbeat.standings] == told
        beating.cancel()

    run(work())
    assert ("most recent call first" in capfd.readouterr().err) is is_shown


def test_a_failure_that_comes_when_the_event_loop_is_over_stops_no_thread() -> None:
    """Each request is told of it, in the engine's thread; the first of them ends the loop."""
    nothing: Any = None

    async def work() -> _Served:
        return _Served(nothing, nothing)

    asyncio.run(work())._hear_failure(RankFailedError("target rank 2 failed"))
