"""Engines in processes of their own: how often they are started again, and what is told of their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from engine_messages import run

from launch.serve.engine import keeper as engine_keeper
from launch.serve.engine.keeper import RestartLimit
from launch.serve.engine.restarted_engine import EngineEvents, RestartedEngine
from trtrun.configuration.config import make_config


def test_restarts_are_counted_within_their_window() -> None:
    now = 0.0
    limit = RestartLimit(2, 10.0, clock=lambda: now)
    assert limit.allow() and limit.allow() and not limit.allow()
    assert str(limit) == "2 of 2 within 10 s"
    now = 10.5
    assert limit.allow() and str(limit) == "1 of 2 within 10 s"
    assert not RestartLimit(0, 10.0).allow()


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_engine_that_is_late_is_told_and_one_that_is_killed_is_not(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_keeper, "END_SECONDS", 0.0)

    told: list[str] = []

    async def check() -> None:
        command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
        keeper = engine_keeper.EngineKeeper(
            lambda: command, os.environ, lambda: False, RestartLimit(0, 1.0), lambda line: None, told.append
        )
        keeping = asyncio.create_task(keeper.keep())
        while keeper._process is None:
            await asyncio.sleep(0.001)
        if is_killed:
            keeper.kill()
        else:
            await keeper.close()
        # asyncio says 255 where its own second signal finds that the process has ended by the first.
        assert await keeping in (128 + signal.SIGTERM, 128 + signal.SIGKILL, 255)

    run(check())
    assert ("has not ended by itself" in caplog.text) is not is_killed
    assert not told


@pytest.mark.parametrize(
    ("end", "status", "lines"),
    [
        ("os.kill(os.getpid(), 9)", 137, ["the engine was ended by SIGKILL before it was up"]),
        ("sys.exit(2)", 2, []),  # it has said why itself
    ],
)
def test_an_engine_that_is_killed_before_it_is_up_is_told_of(end: str, status: int, lines: list[str]) -> None:
    told: list[str] = []

    async def check() -> None:
        command = [sys.executable, "-c", f"import os, sys; {end}"]
        keeper = engine_keeper.EngineKeeper(
            lambda: command, os.environ, lambda: True, RestartLimit(3, 1.0), lambda line: None, told.append
        )
        assert await keeper.keep() == status

    run(check())
    assert told == lines


def test_an_engine_of_one_process_that_hangs_while_it_starts_is_ended() -> None:
    limits = {"start_seconds": 0.3, "heartbeat_seconds": 0.3}
    config = make_config(
        {"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}, "launch": limits}
    )
    engine = RestartedEngine(config, [sys.executable, "-c", "import signal; signal.pause()"])
    told: list[str] = []
    events = EngineEvents(*([lambda *_: told.append("something else")] * 5), told.append, told.append)

    async def check() -> None:
        assert await engine.keep(events) == 128 + signal.SIGKILL

    run(check())
    assert told == ["the engine was ended by SIGKILL before it was up"]
