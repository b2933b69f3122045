"""The engine's thread after a rest: what its first round waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from launch.serve.engine.messages import Begin, Close, Generate, Message
from launch.serve.engine.process import _Served
from parallel.watchdog.activity import Activity
from trtrun.api import engine_thread
from trtrun.api.engine_thread import Arrival, EngineThread, Outlet, Recipient
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError

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
        self.activity = Activity()
        self.config = SimpleNamespace(launch=SimpleNamespace(heartbeat_seconds=PATIENCE))

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(self, prompt: Any, sampling: Any, request_id: Any, generated: Any, *turns: Any) -> None:
        self.requests.append(request_id)

    add_checked = add_request

    def step(self) -> list[CompletionDelta]:
        requests, self.requests = self.requests, []
        self.rounds.append(len(requests))
        return [CompletionDelta(request, 0, (1,), "", RequestStatistics(), None, "length") for request in requests]

    def add_request_work(self, work: str, seconds: float) -> None:
        assert work == "arrivals" and seconds >= 0

    def close(self) -> None:
        pass


@pytest.fixture
def running() -> Iterator[tuple[EngineThread, Core]]:
    core = Core()
    thread = EngineThread(lambda: core)  # type: ignore[arg-type,return-value]
    thread.start()
    yield thread, core
    thread.close()


def arrival_of(reader: Reader, number: int) -> Arrival:
    return Arrival(reader, number, (1,), SamplingParams())


def test_requests_that_are_handed_over_together_begin_together(running: tuple[EngineThread, Core]) -> None:
    thread, core = running
    readers = [Reader() for _ in range(3)]
    thread.add([arrival_of(reader, number) for number, reader in enumerate(readers)], are_checked=True)
    assert all(reader.has_ended.wait(PATIENCE) for reader in readers)
    assert core.rounds == [3]


def test_requests_that_take_long_to_add_have_rounds_between_them(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was ordered behind them is done behind them."""
    thread, core = running
    monkeypatch.setattr(engine_thread, "MOST_SECONDS", -1.0)
    readers, may_begin = [Reader() for _ in range(3)], threading.Event()
    thread.call(lambda engine: may_begin.wait(PATIENCE))
    thread.add([arrival_of(reader, number) for number, reader in enumerate(readers)], are_checked=True)
    behind = thread.call(lambda engine: [*core.rounds])
    may_begin.set()
    assert behind.result(PATIENCE) == [1, 1]
    assert all(reader.has_ended.wait(PATIENCE) for reader in readers) and core.rounds == [1, 1, 1]


def test_requests_that_come_apart_are_waited_for(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, core = running
    monkeypatch.setattr(engine_thread, "MOST_GATHER_SECONDS", PATIENCE)
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", PATIENCE)
    readers = [Reader() for _ in range(3)]
    for number, reader in enumerate(readers):
        if number == 2:
            monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 0.0)
        thread.add([arrival_of(reader, number)])
        if number < 2:
            assert thread.call(lambda engine: len(core.requests)).result(PATIENCE) == number + 1
    assert all(reader.has_ended.wait(PATIENCE) for reader in readers)
    assert core.rounds == [3]


def test_nobody_is_waited_for_behind_what_a_front_hands_over(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, core = running
    monkeypatch.setattr(engine_thread, "MOST_GATHER_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 2 * PATIENCE)
    reader = Reader()
    thread.add([arrival_of(reader, 0)], are_checked=True)
    assert reader.has_ended.wait(PATIENCE) and core.rounds == [1]


def test_one_that_is_refused_keeps_out_none_that_came_with_it(
    running: tuple[EngineThread, Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, core = running
    add = core.add_request

    def refuse_first(prompt: Any, sampling: Any, request_id: Any, *others: Any) -> None:
        if request_id == 0:
            raise InvalidRequestError("no")
        add(prompt, sampling, request_id, *others)

    monkeypatch.setattr(core, "add_checked", refuse_first)
    readers = [Reader() for _ in range(3)]
    thread.add([arrival_of(reader, number) for number, reader in enumerate(readers)], are_checked=True)
    assert all(reader.has_ended.wait(PATIENCE) for reader in readers)
    assert core.rounds == [2] and readers[0].is_over


def test_what_the_front_sends_as_one_is_handed_over_as_one() -> None:
    class Told:
        def __init__(self) -> None:
            self.ids: list[list[Any]] = []

        def deliver(self, arrivals: list[Arrival]) -> None:
            self.ids.append([arrival.request_id for arrival in arrivals])

    async def messages() -> AsyncIterator[Message]:
        for names in ("ab", "c"):
            yield Begin(requests=tuple(Generate.of(name, (1,), SamplingParams(), None) for name in names))
        yield Close()

    async def work() -> None:
        told = Told()
        await _Served(told, None)._read(messages())  # type: ignore[arg-type]
        assert told.ids == [["a", "b"], ["c"]]

    asyncio.run(work())
