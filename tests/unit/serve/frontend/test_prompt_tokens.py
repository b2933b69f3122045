"""Prompts of requests that come together become tokens together: the same tokens, and nobody's error is another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
from fronts import TOKENIZER, NoEngine, WatchedTokenizer, make_frontend

from launch.serve.admission.refusals import Refusal
from launch.serve.frontend import coalescing as prompt_tokens
from launch.serve.frontend.coalescing import PromptTokens
from launch.serve.parsing.parsers import UnencodedRequest
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.models.config import read_model_config

TEXTS = ["def main(", "import os\n", "x = {'é': '🙂'}", " "]


class HeldTokenizer(WatchedTokenizer):
    """Makes tokens of several texts only once it may.

    Attributes:
        batches: that it was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []
        self.may = threading.Event()

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.batches.append(list(texts))
        assert self.may.wait(30)
        return super().encode_all(texts)


def encode_together(
    tokenizer: WatchedTokenizer, requests: Sequence[Sequence[Prompt]]
) -> list[list[tuple[int, ...]] | BaseException]:
    """What becomes of requests that come in one turn."""

    async def work() -> list[list[tuple[int, ...]] | BaseException]:
        tokens = PromptTokens(PromptReader(read_model_config(ASSETS / "target"), tokenizer))  # type: ignore[arg-type]
        return await asyncio.gather(*map(tokens.encode, requests), return_exceptions=True)

    return asyncio.run(work())


def tokens_of(text: str) -> tuple[int, ...]:
    assert TOKENIZER is not None
    return tuple(TOKENIZER.encode(text))


def test_requests_of_one_turn_become_tokens_in_one_batch_in_another_thread() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.may.set()
    told = encode_together(tokenizer, [[TEXTS[0]], [TEXTS[1], (5, 6), TEXTS[2]], [(7,)], [TEXTS[3]]])
    assert told == [
        [tokens_of(TEXTS[0])],
        [tokens_of(TEXTS[1]), (5, 6), tokens_of(TEXTS[2])],
        [(7,)],
        [tokens_of(TEXTS[3])],
    ]
    assert tokenizer.batches == [TEXTS]
    assert threading.get_ident() not in tokenizer.threads


def test_one_that_comes_alone_becomes_tokens_at_once() -> None:
    tokenizer = WatchedTokenizer()
    assert encode_together(tokenizer, [TEXTS]) == [list(map(tokens_of, TEXTS))]
    assert set(tokenizer.threads) == {threading.get_ident()}


def test_batches_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tokens, "MOST_LETTERS", 10)
    tokenizer = HeldTokenizer()
    tokenizer.may.set()
    requests = [["abcd"], ["efg", "hi"], ["j"], ["a text that is longer than that"], ["k"]]
    assert encode_together(tokenizer, requests) == [list(map(tokens_of, texts)) for texts in requests]
    assert sorted(map(tuple, tokenizer.batches)) == [
        ("a text that is longer than that",),
        ("abcd", "efg", "hi", "j"),
        ("k",),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("", "the prompt is empty"), ("half \ud800 of a pair", "cannot be tokenized"), ((1 << 20,), "is not a token id")],
    ids=["empty", "surrogate", "id"],
)
def test_a_prompt_that_is_wrong_is_its_own_requests_error(wrong: Prompt, message: str) -> None:
    first, second, third = encode_together(WatchedTokenizer(), [[TEXTS[0]], [TEXTS[1], wrong], [TEXTS[2]]])
    assert first == [tokens_of(TEXTS[0])] and third == [tokens_of(TEXTS[2])]
    assert isinstance(second, InvalidRequestError) and message in str(second)


def test_a_failure_of_any_kind_reaches_those_that_wait() -> None:
    reader = PromptReader(read_model_config(ASSETS / "target"), WatchedTokenizer())  # type: ignore[arg-type]
    reader.encode = reader.encode_texts = lambda given: 1 // 0  # type: ignore[assignment, method-assign]

    async def work() -> None:
        tokens = PromptTokens(reader)
        for count in (1, 2):
            waiting = asyncio.gather(*(tokens.encode(["a"]) for _ in range(count)), return_exceptions=True)
            assert all(isinstance(told, ZeroDivisionError) for told in await asyncio.wait_for(waiting, 30))

    asyncio.run(work())


def test_a_request_waits_for_those_whose_tokens_are_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tokens, "MOST_SECONDS", 60.0)  # however busy the machine is
    tokenizer, engine = HeldTokenizer(), NoEngine()
    frontend = make_frontend(tokenizer, engine)

    async def work() -> None:
        beginning = [asyncio.create_task(frontend.begin(UnencodedRequest.of([TEXTS[0]], SamplingParams()), 0.0))]
        await asyncio.sleep(0)
        beginning += [
            asyncio.create_task(frontend.begin(UnencodedRequest.of([text], SamplingParams()), 0.0))
            for text in TEXTS[1:3]
        ]
        while not tokenizer.batches:
            await asyncio.sleep(0)
        assert not engine.starts
        tokenizer.may.set()
        for generation in await asyncio.gather(*beginning):
            generation.close()

    asyncio.run(work())
    assert engine.starts == [True, True, True]


def test_one_given_up_while_its_tokens_are_made_holds_up_nobody() -> None:
    tokenizer, engine = HeldTokenizer(), NoEngine()
    frontend = make_frontend(tokenizer, engine)

    async def work() -> None:
        beginning = [
            asyncio.create_task(frontend.begin(UnencodedRequest.of([text], SamplingParams()), 0.0))
            for text in [*TEXTS[:2], ""]
        ]
        while not tokenizer.batches:
            await asyncio.sleep(0)
        beginning[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning[0]
        assert frontend.admission.num_requests == 2
        tokenizer.may.set()
        (await beginning[1]).close()
        with pytest.raises(Refusal, match="the prompt is empty"):
            await beginning[2]

    asyncio.run(work())
    assert len(engine.requests) == 1 and frontend.admission.num_requests == frontend.admission.num_completions == 0


def test_too_little_memory_is_no_fault_of_a_prompt() -> None:
    class GreedyTokenizer(WatchedTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if text == "long":
                raise MemoryError
            return [1]

        def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
            raise MemoryError

        def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
            raise MemoryError

    reader = PromptReader(read_model_config(ASSETS / "target"), GreedyTokenizer())  # type: ignore[arg-type]
    tried: list[Callable[[], object]] = [
        lambda: reader.encode("long"),
        lambda: reader.encode_texts(["x", "y"]),
        lambda: reader.check(SamplingParams(bad_words=("x",))),
    ]
    for attempt in tried:
        with pytest.raises(MemoryError):
            attempt()
