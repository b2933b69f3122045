"""The end of a server whose engine is lost while it drains. The engine here computes nothing."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from engine_messages import run
from fronts import NoEngine

from launch.exit_codes import FailedError
from launch.serve.application.addresses import Addresses
from launch.serve.application.serve import _Server
from launch.serve.engine.restarted_engine import EngineEvents
from launch.serve.http.requests import Keys
from trtrun.configuration.config import make_config
from trtrun.start.job_spec import JobSpec


class LostEngine(NoEngine):
    """An engine that is there until the server drains, and then is lost once too often."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.is_lost = asyncio.Event(), asyncio.Event()

    @property
    def engine(self) -> Any:
        return self

    async def keep(self, events: EngineEvents) -> int:
        events.on_ready()
        self.is_ready.set()
        await self.is_lost.wait()
        events.on_lost()
        raise FailedError("it ended too often")

    def is_abandoned(self) -> bool:
        return False

    def end_all(self, error: Exception) -> None:
        pass


def test_a_drain_ends_with_the_last_engine() -> None:
    """What is in work would get no more tokens: nobody waits for the end of its time."""

    async def check() -> None:
        models = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        config = make_config({**models, "launch": {"drain_seconds": 1000}, "server": ports})
        engine = LostEngine()
        server = _Server(JobSpec(config), Keys(()), engine, Addresses.open(config.server, {}))  # type: ignore[arg-type]
        serving = asyncio.create_task(server.run())
        await engine.is_ready.wait()
        server._admission.enter(1)
        server._hear(signal.SIGTERM)
        while not server._admission.is_closing:
            await asyncio.sleep(0)
        engine.is_lost.set()
        with pytest.raises(FailedError, match="too often"):
            await serving

    run(check())
