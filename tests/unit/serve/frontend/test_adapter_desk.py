"""Changes of adapters at the frontend: one after the other, few that wait, and what is left without its client."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import run

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.frontend import adapters as desk_module
from launch.serve.frontend.adapters import AdapterDesk


class Client:
    """An engine that changes adapters when it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_end = asyncio.Event()
        self.loaded: list[str] = []

    async def change_adapters(self, change: Any) -> None:
        self.asked.append(change.lora_name)
        await self.may_end.wait()
        self.loaded.append(change.lora_name)


def desk_of(directory: Path, timeout: float = 60.0) -> tuple[AdapterDesk, Client]:
    (directory / "a").mkdir()
    client = Client()
    frontend: Any = SimpleNamespace(client=client, model_name="pair", adapters=client.loaded)
    return AdapterDesk(frontend, directory.resolve(), timeout), client


async def turns(count: int = 20) -> None:
    """Let all others do what they can."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_is_loaded_at_a_time_and_few_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_MOST_WAITING", 2)

    async def work() -> None:
        desk, client = desk_of(tmp_path)
        loads = []
        for name in "xyz":
            loads.append(asyncio.create_task(desk.load(name, "a")))
            await turns()
        with pytest.raises(Refusal, match="2 changes of adapters wait for their turn") as refused:
            await desk.load("w", "a")
        assert refused.value.kind is Kind.BUSY and client.asked == ["x"]
        loads[1].cancel()  # its client has gone
        await turns()
        fourth = asyncio.create_task(desk.load("v", "a"))
        await turns()
        client.may_end.set()
        await asyncio.gather(loads[0], loads[2], fourth)
        assert client.asked == client.loaded == ["x", "z", "v"]

    run(work())


def test_what_the_engine_is_at_goes_on_without_its_client(tmp_path: Path) -> None:
    """The names of both sides agree, whoever waits; the next one has its turn behind it."""

    async def work() -> None:
        desk, client = desk_of(tmp_path)
        first = asyncio.create_task(desk.load("x", "a"))
        await turns()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        second = asyncio.create_task(desk.load("y", "a"))
        await turns()
        assert client.asked == ["x"]
        client.may_end.set()
        await second
        assert client.loaded == ["x", "y"]

    run(work())


def test_who_waits_for_too_long_is_told_what_becomes_of_it(tmp_path: Path) -> None:
    async def work() -> None:
        desk, client = desk_of(tmp_path, timeout=0.05)
        lines = []
        for name in "xy":
            with pytest.raises(Refusal) as refused:
                await desk.load(name, "a")
            lines.append(str(refused.value))
        assert "and is still loaded: /v1/models has it once it is" in lines[0] and "was not done within" in lines[1]
        client.may_end.set()
        await turns()
        assert client.loaded == ["x"]

    run(work())
