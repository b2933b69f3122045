"""AsyncLLM: deltas for event loops, aborts, slow readers, errors, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pipelines import configuration, make_llm, prompt_of

from trtrun import AsyncLLM, SamplingParams
from trtrun.api import engine_thread
from trtrun.api.llm_engine import LLMEngine
from trtrun.core.outputs import CompletionDelta
from trtrun.errors import CheckpointError, InvalidRequestError, QueueFullError, RankFailedError

T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_waiting": 40},
    "speculation": {"draft_len": 3},
    "kv_cache": {"max_tokens": 4096},
}


@pytest.fixture(scope="module")
def async_llm(folder: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM.open(configuration(folder / "target", folder / "draft", **SETTINGS)) as llm:  # type: ignore[union-attr]
        yield llm


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing runs, and all blocks are free or cached."""
    yield
    if "async_llm" in request.fixturenames:
        llm: AsyncLLM = request.getfixturevalue("async_llm")

        def check(engine: LLMEngine) -> None:
            assert not engine.has_unfinished_requests
            engine.drain()
            engine.check_idle()

        run(llm.call(check))
        assert not llm._thread._recipients


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


async def collect(llm: AsyncLLM, prompt: Any, sampling: SamplingParams, **others: Any) -> list[CompletionDelta]:
    return [delta async for delta in llm.generate(prompt, sampling, **others)]


def tokens(deltas: list[CompletionDelta], index: int = 0) -> tuple[int, ...]:
    return tuple(token for delta in deltas if delta.index == index for token in delta.token_ids)


def test_many_readers_get_what_generate_returns(async_llm: AsyncLLM, folder: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=4, n=2, logprobs=2, ignore_eos=True)
    prompts = [prompt_of(5 + 3 * number, seed=number) for number in range(12)]
    with make_llm(folder / "target", folder / "draft", **SETTINGS) as llm:
        expected = llm.generate(prompts, sampling)

    async def read_all() -> list[list[CompletionDelta]]:
        return await asyncio.gather(*(collect(async_llm, prompt, sampling) for prompt in prompts))

    for deltas, output in zip(run(read_all()), expected, strict=True):
        for completion in output.completions:
            own = [delta for delta in deltas if delta.index == completion.index]
            assert tokens(own, completion.index) == completion.token_ids
            assert "".join(delta.text for delta in own) == completion.text
            assert [entry.token_id for delta in own for entry in delta.logprobs or ()] == list(completion.token_ids)
            assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == "length"


def test_a_slow_reader_gets_one_delta_and_slows_nobody(async_llm: AsyncLLM) -> None:
    async def read() -> tuple[list[CompletionDelta], list[CompletionDelta]]:
        slow = async_llm.generate("slow", GREEDY, "slow")
        first = await anext(slow)
        assert first.finish_reason is None
        while await async_llm.call(lambda engine: engine.has_unfinished_requests):
            pass
        other = await collect(async_llm, "other", GREEDY)
        return [first, *[delta async for delta in slow]], other

    slow, other = run(read())
    assert len(slow) == 2 and len(tokens(slow)) == len(tokens(other)) == 16
    assert slow[1].finish_reason == "length" and slow[0].statistics.num_rounds < slow[1].statistics.num_rounds


def test_an_iterator_that_ends_early_aborts_its_request(async_llm: AsyncLLM) -> None:
    async def read() -> None:
        async for _ in async_llm.generate("abc", ENDLESS, "endless"):
            break
        task = asyncio.create_task(collect(async_llm, "abc", ENDLESS, request_id="cancelled"))
        while not await async_llm.call(lambda engine: engine.has_unfinished_requests):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while await async_llm.call(lambda engine: engine.has_unfinished_requests):
            pass

    run(read())


def test_abort_ends_an_iterator_with_what_it_has(async_llm: AsyncLLM) -> None:
    async def read() -> list[CompletionDelta]:
        found = []
        async for delta in async_llm.generate("abc", ENDLESS, "mine"):
            found.append(delta)
            async_llm.abort("mine")
            async_llm.abort("unknown")
        return found

    deltas = run(read())
    assert deltas and deltas[-1].finish_reason is None and len(tokens(deltas)) < 1000


def test_a_request_goes_on_behind_its_tokens(async_llm: AsyncLLM) -> None:
    whole = run(collect(async_llm, "abc", GREEDY))
    rest = run(collect(async_llm, "abc", GREEDY, generated={0: tokens(whole)[:7]}))
    assert tokens(rest) == tokens(whole)[7:]


def test_who_gives_up_asking_disturbs_nobody(async_llm: AsyncLLM) -> None:
    """As a limit on the time of an answer does."""

    async def work() -> None:
        stream = async_llm.generate(prompt_of(5), GREEDY)
        first = await anext(stream)
        for _ in range(3):
            asking = asyncio.create_task(async_llm.statistics())
            await asyncio.sleep(0)
            asking.cancel()
        rest = [delta async for delta in stream]
        assert len(tokens([first, *rest])) == 16
        assert await async_llm.statistics()

    run(work())


def test_refusals_reach_their_reader_alone(async_llm: AsyncLLM) -> None:
    async def read() -> None:
        going_on = async_llm.generate("abc", GREEDY, "one")
        await anext(going_on)
        with pytest.raises(InvalidRequestError, match="'one' is in use"):
            await collect(async_llm, "abc", GREEDY, request_id="one")
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(async_llm, [], GREEDY)
        with pytest.raises(InvalidRequestError, match="100 completions are asked for at once"):
            await collect(async_llm, "abc", SamplingParams(n=100))
        many = async_llm.generate("abc", SamplingParams(n=40, max_tokens=64, ignore_eos=True))
        await anext(many)
        with pytest.raises(QueueFullError):
            await collect(async_llm, "abc", SamplingParams(n=30))
        await many.aclose()
        assert [delta async for delta in going_on][-1].finish_reason == "length"

    run(read())


def test_a_round_that_fails_costs_the_requests_in_it_and_not_the_next(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = type(async_llm.engine.scheduler)
    original = scheduler.commit
    with monkeypatch.context() as patch:

        def commit(*arguments: Any, **keywords: Any) -> Any:
            patch.setattr(scheduler, "commit", original)
            raise MemoryError("no memory")

        patch.setattr(scheduler, "commit", commit)
        (lost,) = run(collect(async_llm, "abc", GREEDY))
    assert lost.finish_reason == "error" and "lost when" in str(lost.error)
    assert len(tokens(run(collect(async_llm, "abc", GREEDY)))) == 16


def test_a_failed_rank_and_the_end_are_told_to_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM.open(configuration(folder / "target", None))
    assert llm is not None

    async def read() -> None:
        reader = llm.generate("abc", ENDLESS)
        await anext(reader)
        failure = RankFailedError("target rank 2 failed")

        def step() -> None:
            raise failure

        monkeypatch.setattr(llm.engine.orchestrator, "step", step)
        with pytest.raises(RankFailedError, match="target rank 2 failed"):
            async for _ in reader:
                pass
        for work in (collect(llm, "abc", GREEDY), llm.statistics()):
            with pytest.raises(RankFailedError, match="target rank 2 failed"):
                await work

    run(read())
    llm.close()


def test_close_ends_readers_and_may_be_called_twice(folder: Path) -> None:
    llm = AsyncLLM.open(configuration(folder / "target", None))
    assert llm is not None

    async def read() -> None:
        reader = llm.generate("abc", ENDLESS)
        await anext(reader)
        llm.close()
        llm.close()
        with pytest.raises(InvalidRequestError, match="closed"):
            async for _ in reader:
                pass
        with pytest.raises(InvalidRequestError, match="closed"):
            await collect(llm, "abc", GREEDY)

    run(read())


def test_what_cannot_be_opened_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        AsyncLLM.open(configuration(tmp_path, None))


def test_requests_that_come_together_have_their_first_round_together(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def begin(engine: LLMEngine) -> None:
        step = engine.step

        def step_and_tell() -> list[CompletionDelta]:
            started.append(len(engine._requests))
            return step()

        monkeypatch.setattr(engine, "step", step_and_tell)
        # A round waits for as long as this test takes, and then for no more at all.
        monkeypatch.setattr(engine_thread, "MOST_GATHER_SECONDS", 100.0)
        monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 100.0)

    async def work() -> None:
        await async_llm.call(begin)
        reading = [asyncio.create_task(collect(async_llm, prompt_of(5, number), GREEDY)) for number in range(4)]
        await asyncio.sleep(0)
        assert await async_llm.call(lambda engine: len(engine._requests)) == 4 and not started
        await async_llm.call(lambda engine: monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 0.0))
        for deltas in await asyncio.gather(*reading):
            assert len(tokens(deltas)) == 16

    run(work())
    assert started[0] == 4
