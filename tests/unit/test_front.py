"""The way of a request through the front, without an engine: what is held to limits, and what is done beside the event
loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from fronts import TOKENIZER, NoEngine, WatchedTokenizer, make_front

from launch.serve.aside import SHORT_TEXT
from launch.serve.front import Generation
from launch.serve.refusals import Kind, Refusal
from trtrun.errors import InvalidRequestError
from trtrun.prompts import PromptReader
from trtrun.sampling_params import SamplingParams


async def leave(generation: Generation) -> None:
    """Make nothing of a request."""


def begin(
    prompts: list[Any],
    sampling: SamplingParams | list[SamplingParams],
    use: Callable[[Generation], Awaitable[None]] = leave,
) -> tuple[WatchedTokenizer, NoEngine]:
    """Let a request in, use it, and give it up."""
    tokenizer, engine = WatchedTokenizer(), NoEngine()
    front = make_front(tokenizer, engine)

    async def work() -> None:
        generation = await front.begin(prompts, sampling, time.perf_counter())
        try:
            await use(generation)
        finally:
            generation.close()

    try:
        asyncio.run(work())
    finally:
        assert front.door.num_requests == front.door.num_completions == 0
    return tokenizer, engine


@pytest.mark.parametrize(
    ("prompts", "words", "is_aside"),
    [
        (["def main("], (), False),
        (["def main("] * 3, ("os",), False),
        (["x = 1\n" * 1000], (), True),
        (["def main(" * 10] * 100, (), True),  # each is short
        (["def main("], ("some words " * 50,) * 10, True),
    ],
    ids=["short", "some", "long", "many", "words"],
)
def test_long_texts_become_tokens_beside_the_streams(
    prompts: list[str], words: tuple[str, ...], is_aside: bool
) -> None:
    tokenizer, engine = begin(prompts, SamplingParams(bad_words=words))
    assert {thread != threading.get_ident() for thread in tokenizer.threads} == {is_aside}
    assert TOKENIZER is not None
    assert [list(request.prompt_token_ids) for request in engine.requests] == list(map(TOKENIZER.encode, prompts))
    assert len({request.sampling.seed for request in engine.requests}) == 1


def test_words_of_many_prompts_become_tokens_once() -> None:
    of_each = [SamplingParams(bad_words=("os", "sys"), seed=seed) for seed in range(3)]
    for sampling in (of_each[0], of_each):
        tokenizer, engine = begin(["a", "b", "c"], sampling)
        assert tokenizer.words == [("os", "sys")] and len(engine.requests) == 3


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_words_have_limits(name: str) -> None:
    begin(["x"], SamplingParams(**{name: ("os",) * 1024}))
    for words in (("os",) * 1025, ("x" * 40_000, "y" * 40_000)):
        with pytest.raises(Refusal, match="are the most") as caught:
            begin(["x"], SamplingParams(**{name: words}))
        assert caught.value.kind is Kind.INVALID and caught.value.field == name


class CountedWords(tuple[str, ...]):
    """Words that count how often they are gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[str]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("is_list", [False, True])
def test_too_many_words_are_refused_without_a_look_at_them(name: str, is_list: bool) -> None:
    words = CountedWords(("os",) * 1025)
    sampling = SamplingParams()
    object.__setattr__(sampling, name, words)  # the constructor would make them a plain tuple
    with pytest.raises(Refusal, match=f"{name} has 1025 entries"):
        begin(["x"] * 100, [sampling] * 100 if is_list else sampling)
    assert words.num_passes == 0


def test_words_of_many_prompts_are_checked_and_counted_once() -> None:
    words = CountedWords(("os", "sys"))
    sampling = SamplingParams(seed=1)
    object.__setattr__(sampling, "bad_words", words)
    passes = []
    for prompts in (["x"], ["x"] * 100):
        words.num_passes = 0
        begin(prompts, sampling)
        passes.append(words.num_passes)
    assert passes[0] == passes[1]


@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "draft_token_ids"])
def test_long_parameters_are_read_beside_the_streams(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [place % 100 for place in range(length)]
    sampling = SamplingParams(**{name: dict.fromkeys(range(length), 1.0) if name == "logit_bias" else tokens})
    threads = []
    with_seed, check = SamplingParams.with_seed, PromptReader.check

    def watched_seed(parameters: SamplingParams) -> SamplingParams:
        threads.append(threading.get_ident())
        return with_seed(parameters)

    def watched_check(reader: PromptReader, parameters: SamplingParams) -> None:
        threads.append(threading.get_ident())
        with suppress(InvalidRequestError):  # of ids beyond a small vocabulary
            check(reader, parameters)

    monkeypatch.setattr(SamplingParams, "with_seed", watched_seed)
    monkeypatch.setattr(PromptReader, "check", watched_check)
    begin(["x", "y"], sampling)
    assert [thread != threading.get_ident() for thread in threads] == [length > SHORT_TEXT] * 2


def test_the_first_prompt_that_is_wrong_refuses_all() -> None:
    with pytest.raises(Refusal, match="not a token id between"):
        begin(["x", [10**6]], SamplingParams())
    with pytest.raises(Refusal, match="draft_len"):
        begin(["x"], SamplingParams(draft_len=5))


def test_the_time_of_a_request_runs_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("launch.serve.front.time.perf_counter", lambda: now)

    def encode(tokenizer: WatchedTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal now
        now += 61.0  # longer than a request may take
        return [1]

    monkeypatch.setattr(WatchedTokenizer, "encode", encode)

    async def use(generation: Generation) -> None:
        with pytest.raises(Refusal, match="was not done within 60 s"):
            await asyncio.wait_for(generation.take(), 30)

    begin(["x"], SamplingParams(), use)
