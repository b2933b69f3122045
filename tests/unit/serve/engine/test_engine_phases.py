"""Where the threads of an engine stand outside of rounds: one that stands still is named, with its phase."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint, make_tokenizer
from engine_messages import run
from pipelines import LLM_VOCABULARY, configuration

from launch.serve.engine.keeper import find_late
from launch.serve.engine.messages import AdapterChanged, Begin, Close, DropAdapter, Generate, LoadAdapter, Message
from launch.serve.engine.process import _Served, describe_ranks
from parallel.watchdog.activity import Activity, Phase
from trtrun import SamplingParams
from trtrun.api.async_llm import AsyncLLM
from trtrun.core.guide import Guide
from trtrun.engine.runner import Engine
from trtrun.errors import CheckpointError
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.row_guide import GuideBuilds
from trtrun.rounds.round import Worker

LIMITS = {"heartbeat_seconds": 1.0, "adapter_seconds": 0.5}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("phases")
    target = make_checkpoint(folder / "target", vocab_size=LLM_VOCABULARY, eos_token_id=0)
    make_tokenizer(target, merges=26)
    slots = {"max_loaded": 2, "max_rank": 4}
    with AsyncLLM.open(configuration(target, None, launch=LIMITS, adapter_slots=slots)) as engine:  # type: ignore[union-attr]
        yield engine


@pytest.fixture(scope="module")
def path(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "a", engine.config.target.model, rank=4)


class Stall:
    """Where a thread stands still until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.may_go_on.wait(60.0)


@pytest.fixture
def stall() -> Iterator[Stall]:
    stall = Stall()
    yield stall
    stall.may_go_on.set()


def before(stall: Callable[..., None], original: Any) -> Any:
    """The same function, which stands still first."""

    def stalled(*given: Any, **more: Any) -> Any:
        stall(*given)
        return original(*given, **more)

    return stalled


def late(engine: AsyncLLM, is_late: bool) -> tuple[str, str]:
    """The phase in which a thread stands still, and what it is doing; waits until one does, or none."""
    deadline = time.monotonic() + 60.0
    while ((found := find_late(describe_ranks(engine))) is not None) != is_late:
        assert time.monotonic() < deadline, describe_ranks(engine)
        threading.Event().wait(0.02)
    return ("", "") if found is None else (found.phase, found.doing)


def load(engine: AsyncLLM, name: str, path: Path) -> Callable[[], Any]:
    """Begin to load an adapter; what comes back waits for the end, and has what came of it."""
    is_over, ended = threading.Event(), []

    def end(error: Any) -> None:
        ended.append(error)
        is_over.set()

    engine._thread.call(lambda core: core.begin_adapter(name, path, end)).result(60.0)
    return lambda: (is_over.wait(60.0), ended[0])[1]


def generate(engine: AsyncLLM, **sampling: Any) -> tuple[int, ...]:
    async def read() -> tuple[int, ...]:
        parameters = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
        return tuple([token async for delta in engine.generate([5, 6], parameters) for token in delta.token_ids])

    return asyncio.run(asyncio.wait_for(read(), 60.0))


def test_an_adapter_that_is_not_read_is_named_and_rounds_go_on(
    engine: AsyncLLM, path: Path, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(engine)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "read_adapter", before(stall, Engine.read_adapter))
        ended = load(engine, "x", path)
        behind = load(engine, "x", path)
        assert generate(engine) == expected
        assert late(engine, True) == ("adapters", "in loading adapter 'x'")
        assert generate(engine) == expected
        stall.may_go_on.set()
        assert ended() is None and 'lora_name "x" is loaded' in str(behind())
    assert late(engine, False)
    assert generate(engine, lora_name="x") != expected
    engine._thread.call(lambda core: core.drop_adapter("x")).result(60.0)


def test_progress_of_an_adapter_counts(
    engine: AsyncLLM, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long it takes; and what cannot be read is told."""
    read, told = Engine.read_adapter, []

    def slow(runner: Engine, path: Path, on_progress: Callable[[], None]) -> Any:
        def get_on() -> None:
            told.append(find_late(describe_ranks(engine)))
            threading.Event().wait(0.05)
            on_progress()

        return read(runner, path, get_on)

    monkeypatch.setattr(Engine, "read_adapter", slow)
    assert load(engine, "slow", path)() is None
    assert len(told) > 10 and not any(told)
    error = load(engine, "none", tmp_path)()
    assert isinstance(error, CheckpointError) and "adapter_config.json" in str(error)
    engine._thread.call(lambda core: core.drop_adapter("slow")).result(60.0)


@pytest.mark.parametrize(
    ("place", "phase", "words"),
    [
        ((Engine, "empty_slot"), "adapters", "in installing adapter 'x'"),
        ((Activity, "advance"), "idle", "idle"),
        ((GuideBuilds, "_build"), "guides", "in compiling a guide"),
        (None, "orders", "doing what was asked between rounds"),
    ],
)
def test_each_phase_is_named(
    engine: AsyncLLM, path: Path, stall: Stall, monkeypatch: pytest.MonkeyPatch, place: Any, phase: str, words: str
) -> None:
    begun: list[Any] = []
    if phase == "adapters":
        install = Worker.install_adapter

        def stalled(worker: Worker, name: str, slot: int, fill: Callable[[int], None]) -> None:
            install(worker, name, slot, lambda slot: (stall(), fill(slot))[0])

        monkeypatch.setattr(Worker, "install_adapter", stalled)
        begun.append(load(engine, "x", path))
    elif phase == "guides":
        monkeypatch.setattr(Grammars, "has", lambda *_: False)  # those that a check of the same process has compiled
        monkeypatch.setattr(GuideBuilds, "_build", before(stall, GuideBuilds._build))
        thread = threading.Thread(target=generate, args=(engine,), kwargs={"guided": Guide("regex", "[ab]{4}")})
        thread.start()
        begun.append(thread.join)
    elif phase == "orders":
        begun.append(engine._thread.call(stall).result)
    else:
        advance = Activity.advance

        def idle_or_on(activity: Activity) -> None:
            if activity.look().phase is Phase.IDLE:
                stall()
            advance(activity)

        monkeypatch.setattr(Activity, "advance", idle_or_on)
    found = late(engine, True)
    assert found[0] == phase and found[1].startswith(words)
    stall.may_go_on.set()
    for wait in begun:
        wait()
    if phase == "adapters":
        engine._thread.call(lambda core: core.drop_adapter("x")).result(60.0)
    late(engine, False)
    assert generate(engine)


class Told:
    """Keeps what goes out to the frontend."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def send(self, message: Message) -> None:
        assert isinstance(message, AdapterChanged), message
        self.said.append("changed" if message.error is None else message.error)

    def add(self, delta: Any) -> None:
        self.said.append(str(delta.request_id))

    def flush(self, recipients: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        raise AssertionError(request_id)


def test_requests_wait_for_the_adapter_that_they_name_and_others_do_not(
    engine: AsyncLLM, path: Path, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine that was started again, and has to load first what the one before had."""
    monkeypatch.setattr(Engine, "read_adapter", before(stall, Engine.read_adapter))
    told: Any = Told()

    def begin(name: str | None) -> Begin:
        sampling = SamplingParams(max_tokens=1, lora_name=name)
        return Begin(requests=(Generate.of(f"with {name}", [5, 6], sampling, None),))

    async def messages() -> Any:
        yield LoadAdapter(lora_name="y", path=str(path))
        yield begin("y")
        yield begin(None)
        while "with None" not in told.said:
            await asyncio.sleep(0)
        assert told.said == ["with None"]
        stall.may_go_on.set()
        yield DropAdapter(lora_name="y")
        while len(told.said) < 4:
            await asyncio.sleep(0)
        yield Close()

    async def work() -> None:
        served = _Served(engine, told)
        changing = asyncio.create_task(served._change_adapters())
        await served._read(messages())
        changing.cancel()

    run(work())
    assert told.said[1] == "changed" and sorted(told.said[2:]) == ["changed", "with y"]
