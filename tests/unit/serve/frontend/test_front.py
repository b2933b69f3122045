"""The way of a request through the frontend, without an engine: what is held to limits, and what is done beside the
event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from engine_messages import delta_of
from fronts import TOKENIZER, NoEngine, WatchedTokenizer, make_frontend

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.frontend.frontend import Generation, Usage
from launch.serve.parsing.parsers import ParsedRequest, UnencodedRequest
from trtrun.api.deltas import NOT_FINITE
from trtrun.api.prompts import PromptReader
from trtrun.core.outputs import NONE_ALLOWED
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams


async def leave(generation: Generation) -> None:
    """Make nothing of a request."""


def begin(
    prompts: list[Any],
    sampling: SamplingParams | list[SamplingParams],
    use: Callable[[Generation], Awaitable[None]] = leave,
) -> tuple[WatchedTokenizer, NoEngine]:
    """Let a request in, use it, and give it up."""
    tokenizer, engine = WatchedTokenizer(), NoEngine()
    frontend = make_frontend(tokenizer, engine)

    async def work() -> None:
        of_each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        generation = await frontend.begin(UnencodedRequest(prompts, of_each), time.perf_counter())
        try:
            await use(generation)
        finally:
            generation.close()

    try:
        asyncio.run(work())
    finally:
        assert frontend.admission.num_requests == frontend.admission.num_completions == 0
    return tokenizer, engine


def test_prompts_become_tokens_with_one_seed_for_all() -> None:
    prompts = ["def main(", "x = 1"]
    tokenizer, engine = begin(prompts, SamplingParams(bad_words=("os",)))
    assert TOKENIZER is not None and tokenizer.words == [("os",)]
    assert [list(request.prompt_token_ids) for request in engine.requests] == list(map(TOKENIZER.encode, prompts))
    assert len({request.sampling.seed for request in engine.requests}) == 1


def test_words_of_many_prompts_become_tokens_once() -> None:
    of_each = [SamplingParams(bad_words=("os", "sys"), seed=seed) for seed in range(3)]
    for sampling in (of_each[0], of_each):
        tokenizer, engine = begin(["a", "b", "c"], sampling)
        assert tokenizer.words == [("os", "sys")] and len(engine.requests) == 3


def test_cached_tokens_of_a_prompt_count_once_however_many_completions_it_has() -> None:
    usage = Usage(100 + 40, 2)
    for choice, cached in enumerate((96, 80, 32, 32)):  # two prompts; one completion came later, and found less
        usage.statistics[choice] = RequestStatistics(num_cached_prompt_tokens=cached)
    assert usage.num_cached_prompt_tokens == 80 + 32


def test_words_of_all_prompts_have_a_limit() -> None:
    """Each prompt goes to the engine with its own."""
    sampling = SamplingParams(bad_words=("x" * 1000,), stop=("y" * 24,))
    begin(["x"] * 1024, sampling)
    one_more = SamplingParams(bad_words=("x" * 1000,), stop=("y" * 25,))
    for parameters in (one_more, [one_more] * 1024, [SamplingParams(logit_bias=one_bias(1025))] * 1024):
        with pytest.raises(Refusal, match="hold 1049600 characters and tokens over all prompts") as caught:
            begin(["x"] * 1024, parameters)
        assert caught.value.kind is Kind.INVALID


def one_bias(count: int) -> dict[int, float]:
    return dict.fromkeys(range(count), 1.0)


def test_what_was_read_elsewhere_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("gone through")

    def check(reader: PromptReader, parameters: SamplingParams) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(PromptReader, "check", check)
    sampling = SamplingParams.from_checked({"stop_token_ids": Unread(range(5000))})
    frontend = make_frontend(WatchedTokenizer(), NoEngine())

    async def work() -> None:
        request = ParsedRequest([5000], [cast(Any, Unread(range(5000)))], [sampling], {})
        (await frontend.begin(request, time.perf_counter())).close()

    asyncio.run(work())


def test_the_first_prompt_that_is_wrong_refuses_all() -> None:
    with pytest.raises(Refusal, match="not a token id between"):
        begin(["x", [10**6]], SamplingParams())
    with pytest.raises(Refusal, match="draft_len"):
        begin(["x"], SamplingParams(draft_len=5))


@pytest.mark.parametrize(("error", "kind"), [(NONE_ALLOWED, Kind.INVALID), (NOT_FINITE, Kind.FAILED)])
def test_a_row_that_forbids_itself_everything_is_its_clients_fault(error: str, kind: Kind) -> None:
    async def use(generation: Generation) -> None:
        generation._inbox.put(0, msgspec.structs.replace(delta_of((), "error"), error=error))
        with pytest.raises(Refusal) as caught:
            await generation.take()
        assert (caught.value.kind, str(caught.value)) == (kind, error)

    begin(["x"], SamplingParams(), use)


def test_the_time_of_a_request_runs_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("launch.serve.frontend.frontend.time.perf_counter", lambda: now)

    def encode(tokenizer: WatchedTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal now
        now += 61.0  # longer than a request may take
        return [1]

    monkeypatch.setattr(WatchedTokenizer, "encode", encode)

    async def use(generation: Generation) -> None:
        with pytest.raises(Refusal, match="was not done within 60 s"):
            await asyncio.wait_for(generation.take(), 30)

    begin(["x"], SamplingParams(), use)
