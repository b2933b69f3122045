"""What an engine that is started again is told of adapters, and what of that the front offers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from adapters import edit_adapter, make_adapter
from checkpoints import make_checkpoint
from engine_messages import SAMPLING, run

from launch.serve.admission.refusals import Refusal
from launch.serve.engine.adapters import AdapterRegistry
from launch.serve.engine.client import EngineClient
from launch.serve.engine.messages import AdapterChanged, DropAdapter, LoadAdapter, Message, MessageStream
from launch.serve.engine.open_requests import EngineRequest, Inbox


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(make_adapter(tmp_path / "a", make_checkpoint(tmp_path / "target"), modules=["q_proj"]))


def load(name: str, path: str) -> LoadAdapter:
    return LoadAdapter(lora_name=name, path=path)


def drop(name: str) -> DropAdapter:
    return DropAdapter(lora_name=name)


def test_the_next_engine_has_what_the_last_one_had(path: str) -> None:
    registry = AdapterRegistry.of(["a", "b"])
    assert registry.names == ["a", "b"] and list(registry.changes([])) == []
    for change in (load("c", path), drop("a"), drop("b"), load("b", path)):
        registry.enter(change)
    assert registry.names == ["c", "b"]
    assert list(registry.changes([])) == [drop("a"), drop("b"), load("c", path), load("b", path)]


def test_what_was_dropped_is_there_for_requests_that_have_it(path: str) -> None:
    registry = AdapterRegistry.of(["a"])
    for change in (load("c", path), drop("c"), drop("a")):
        registry.enter(change)
    assert registry.names == [] and list(registry.changes(["a", "c"])) == [load("c", path)]
    assert registry.clear(["a", "c"]) == [] and registry.clear(["c"]) == [drop("a")]
    assert registry.clear([]) == [drop("c")] and registry.clear([]) == []
    assert list(registry.changes([])) == [drop("a")]


def test_files_that_have_changed_are_not_loaded_again(path: str) -> None:
    registry = AdapterRegistry.of([])
    registry.enter(load("c", path))
    edit_adapter(Path(path), lora_alpha=3)
    assert list(registry.changes([])) == [] and registry.names == []


def test_what_engines_are_lost_of_is_not_loaded_again_for_ever(path: str) -> None:
    registry = AdapterRegistry.of([])
    for name in ("c", "d"):
        registry.enter(load(name, path))
    assert not registry.give_up("c", at_once=False)  # by chance
    registry.note_loaded("c")
    assert not registry.give_up("c", at_once=False) and registry.names == ["c", "d"]
    assert registry.give_up("c", at_once=False) and registry.names == ["d"]
    assert registry.give_up("d", at_once=True) and registry.names == []


def test_a_change_that_holds_the_engine_up_is_told_why(path: str) -> None:
    async def check() -> None:
        client = EngineClient()
        client._writer = Ended()  # type: ignore[assignment]
        await told(client, load("c", path), [None])
        client._change_adapters(load("c", path), None)  # as for an engine that was started again
        client.drop("it stands still in loading adapter 'c' for longer than 300 s")
        assert client.adapters.names == []
        client._writer = Ended()  # type: ignore[assignment]
        asking = [asyncio.create_task(client.change_adapters(load(name, path))) for name in "de"]
        await asyncio.sleep(0)
        client.drop("it stands still in loading adapter 'd' for longer than 300 s")
        with pytest.raises(Refusal, match="the engine hangs: it stands still in loading adapter 'd'"):
            await asking[0]
        with pytest.raises(Refusal, match="the engine was lost meanwhile"):
            await asking[1]

    run(check())


class Ended:
    """An engine's connection, of which is read what the client has written."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.reader.feed_data(data)

    def close(self) -> None:
        self.reader.feed_eof()

    async def heard(self) -> list[str]:
        self.reader.feed_eof()
        return [type(message).__name__ async for message in MessageStream(self.reader)]


async def told(client: EngineClient, change: Message, answers: Sequence[str | None]) -> None:
    """Have an engine asked that answers so."""
    assert isinstance(change, LoadAdapter | DropAdapter)
    asking = asyncio.create_task(client.change_adapters(change))
    await asyncio.sleep(0)
    for answer in answers:
        client._take(AdapterChanged(error=answer))
    await asking


def test_a_change_is_what_the_engine_says(path: str) -> None:
    async def check() -> None:
        client = EngineClient()
        with pytest.raises(Refusal, match="the engine is starting"):
            await client.change_adapters(load("c", path))
        client._writer = Ended()  # type: ignore[assignment]
        with pytest.raises(Refusal, match="no slot is free"):
            await told(client, load("c", path), ["no slot is free"])
        assert client.adapters.names == []
        await told(client, load("c", path), [None])
        assert client.adapters.names == ["c"]
        client.start([EngineRequest([1], replace(SAMPLING, lora_name="c"))], Inbox())
        await told(client, drop("c"), [None])
        with pytest.raises(Refusal, match="requests still have the adapter 'c' that was dropped"):
            await client.change_adapters(load("c", path))
        asking = asyncio.create_task(client.change_adapters(load("d", path)))
        await asyncio.sleep(0)
        writer = client._writer
        client.drop()
        with pytest.raises(Refusal, match="the engine was lost meanwhile"):
            await asking
        heard = await writer.heard()  # type: ignore[attr-defined]
        assert heard == ["LoadAdapter", "LoadAdapter", "Begin", "DropAdapter", "LoadAdapter"]

    run(check())
