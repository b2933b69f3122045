"""The engine's thread after a rest: what its first round waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from launch.serve.engine.messages import Close, Generate, Message
from launch.serve.engine.process import _Served
from trtrun.api import engine_thread
from trtrun.api.engine_thread import EngineThread
from trtrun.api.recipients import Outlet, Recipient
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams

PATIENCE = 60.0


class Nowhere(Outlet):
    """Tells nobody."""

    def flush(self, recipients: Any) -> None:
        pass


class Reader(Recipient):
    """Says when its request is over."""

    def __init__(self) -> None:
        super().__init__(Nowhere())
        self.has_ended = threading.Event()

    def _keep(self, delta: CompletionDelta) -> None:
        self.has_ended.set()

    def _keep_error(self, error: BaseException | None) -> None:
        self.has_ended.set()


class Core:
    """An engine core whose every round ends all requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.rounds: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(self, prompt: Any, sampling: Any, request_id: Any, generated: Any, group: Any) -> None:
        self.requests.append(request_id)

    def step(self) -> list[CompletionDelta]:
        requests, self.requests = self.requests, []
        self.rounds.append(len(requests))
        return [CompletionDelta(request, 0, (1,), "", RequestStatistics(), None, "length") for request in requests]

    def close(self) -> None:
        pass


@pytest.fixture
def running() -> Iterator[tuple[EngineThread, Core]]:
    core = Core()
    thread = EngineThread(lambda: core)  # type: ignore[arg-type,return-value]
    thread.start()
    yield thread, core
    thread.close()


def test_requests_that_are_announced_are_waited_for(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, core = running
    monkeypatch.setattr(engine_thread, "MOST_GATHER_SECONDS", PATIENCE)
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 0.0)
    readers = [Reader() for _ in range(3)]
    for number, reader in enumerate(readers):
        thread.add(reader, number, (1,), None, None, more_follow=number < 2)
        if number < 2:
            assert thread.call(lambda engine: len(core.requests)).result(PATIENCE) == number + 1
    assert all(reader.has_ended.wait(PATIENCE) for reader in readers)
    assert core.rounds == [3]


def test_nobody_is_waited_for_behind_the_last_one(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, core = running
    monkeypatch.setattr(engine_thread, "MOST_GATHER_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 2 * PATIENCE)
    reader = Reader()
    thread.add(reader, 0, (1,), None, None, more_follow=False)
    assert reader.has_ended.wait(PATIENCE) and core.rounds == [1]


def test_what_the_front_says_of_those_that_follow_is_passed_on() -> None:
    class Told:
        def __init__(self) -> None:
            self.more_follow: list[Any] = []

        def deliver(self, *arguments: Any) -> None:
            self.more_follow.append(arguments[-1])

    async def messages() -> AsyncIterator[Message]:
        for more_follow in (True, False):
            yield Generate.of(str(more_follow), (1,), SamplingParams(), None, None, more_follow)
        yield Close()

    async def work() -> None:
        told = Told()
        await _Served(told, None)._read(messages())  # type: ignore[arg-type]
        assert told.more_follow == [True, False]

    asyncio.run(work())
