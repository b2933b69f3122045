"""Prompts in front of choices: whatever order pieces come in, and how log probabilities are told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from launch.serve.api.openai.answers import ChatAnswer, CompletionAnswer
from launch.serve.api.openai.calls import Answering
from launch.serve.frontend.frontend import Usage
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, PromptLogprobs
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.tokens.text import Tokenizer, read_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = read_tokenizer(ASSETS / "target")
    assert found is not None
    return found


def scores_of(tokens: list[int], alternatives: int) -> PromptLogprobs:
    """Of a prompt: its own tokens at -1, -2, …; the likeliest of each place are tokens 7, 8, … at -0.5."""
    named = [[token, *range(7, 7 + alternatives)] for token in tokens[1:]]
    values = [[-float(place), *[-0.5] * alternatives] for place in range(1, len(tokens))]
    ids = np.array(named, dtype=np.int32).tobytes()
    return PromptLogprobs(1 + alternatives, ids, np.array(values, dtype=np.float32).tobytes())


def delta(index: int, token: int, text: str, scores: PromptLogprobs | None = None) -> CompletionDelta:
    logprobs = (TokenLogprobs(token, -9.0, ((7, -0.5),)),)
    return CompletionDelta(1, index, (token,), text, RequestStatistics(), logprobs, "length", prompt_logprobs=scores)


def answering(n: int, **fields: object) -> Answering:
    sampling = SamplingParams(logprobs=1, prompt_logprobs=2, n=n)
    return Answering(sampling, False, False, False, **{"echo": True, **fields})  # type: ignore[arg-type]


def test_what_comes_before_a_prompts_log_probabilities_waits_for_them(tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode("import os"), tokenizer.encode("def main(")]
    answer = CompletionAnswer("m", tokenizer, answering(2), prompts)
    x = tokenizer.encode("x")[0]
    assert answer.chunks(delta(3, x, "x")) == []
    chunks = answer.chunks(delta(0, x, "x", scores_of(prompts[0], 2)))
    chunks += answer.chunks(delta(2, x, "x", scores_of(prompts[1], 2)))
    chunks += answer.chunks(delta(1, x, "x"))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "import os"), (0, "x"), (2, "def main("), (2, "x"), (3, "def main("), (3, "x"), (1, "import os"), (1, "x"),
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None, "length"] * 4
    for first, second in zip(choices[::2], choices[1::2], strict=True):
        told, tokens = first["logprobs"], prompts[first["index"] // 2]
        assert told["token_logprobs"] == [None, *(-float(place) for place in range(1, len(tokens)))]
        own = [{tokenizer.decode([token]): -float(place)} for place, token in enumerate(tokens)]
        assert told["top_logprobs"] == [None, *({**one, tokenizer.decode([7]): -0.5} for one in own[1:])]
        assert second["logprobs"]["text_offset"] == [len(first["text"])]


def test_whole_answers_say_the_same_as_streams(tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode("import os")]
    answer = CompletionAnswer("m", tokenizer, answering(2, prompt_logprobs=1), prompts)
    for piece in (delta(1, 7, "x"), delta(0, 7, "x", scores_of(prompts[0], 2))):
        answer.keep(piece)
    choices = json.loads(b"".join(answer.whole(Usage(1), 0)))["choices"]
    for choice in choices:
        assert choice["text"] == "import osx"
        assert len(choice["logprobs"]["tokens"]) == len(prompts[0]) + 1 == len(choice["logprobs"]["top_logprobs"])
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        for place, (token, entry) in enumerate(zip(prompts[0][1:], entries, strict=True), start=1):
            own = {"logprob": -float(place), "rank": None, "decoded_token": tokenizer.decode([token])}
            assert entry == {
                str(token): own, "7": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([7])},
            }  # fmt: skip


def test_chats_have_them_beside_their_choices(tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode("import os")]
    answer = ChatAnswer("m", tokenizer, answering(1, echo=False, prompt_logprobs=0), prompts)
    answer.keep(delta(0, 7, "x", scores_of(prompts[0], 2)))
    told = json.loads(b"".join(answer.whole(Usage(1), 0)))
    assert told["choices"][0]["message"]["content"] == "x" and "prompt_logprobs" not in told["choices"][0]
    assert [entry and [*entry] for entry in told["prompt_logprobs"]] == [None, *([str(t)] for t in prompts[0][1:])]


def test_without_a_tokenizer_there_is_no_text() -> None:
    answer = CompletionAnswer("m", None, answering(1), [[3, 4]])
    first, _ = answer.chunks(delta(0, 7, "", scores_of([3, 4], 2)))
    choice = first["choices"][0]
    assert choice["text"] == "" and choice["logprobs"]["tokens"] == ["token_id:3", "token_id:4"]
