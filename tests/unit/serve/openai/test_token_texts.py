"""Each token's own part of a text."""

from __future__ import annotations

import json

import msgspec
import pytest

from launch.serve.api.openai.answer_parts import TokenTexts
from launch.serve.api.openai.answers import CompletionAnswer
from launch.serve.api.openai.calls import Answering
from launch.serve.frontend.frontend import Usage
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.tokens.text import read_tokenizer


def test_a_character_of_several_tokens_is_its_last_ones() -> None:
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    text = 'a = "\u2192\U0001f600\u00e9"'
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)  # some characters take several
    for size in (1, 2, 3, len(tokens)):
        texts = TokenTexts(tokenizer, [tokenizer.encode("import os"), [5]], 2)
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        found = [token for part in parts for token in texts.take(3, part, is_end=part is parts[-1])]
        told = [token.text for token in found]
        assert "".join(told) == text and len(told) == len(tokens)
        assert "\ufffd" not in "".join(told)


def test_what_is_left_at_the_end_is_the_last_tokens_and_without_a_tokenizer_there_is_no_text() -> None:
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    torn = tokenizer.encode("\U0001f600")[:-1]
    assert not any(token.text for token in TokenTexts(tokenizer, [[5]], 1).take(0, torn, is_end=False))
    assert "\ufffd" in TokenTexts(tokenizer, [[5]], 1).take(0, torn, is_end=True)[-1].text
    assert TokenTexts(None, [[5]], 1).take(0, [1, 2], is_end=True) == [(0, ""), (0, "")]


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_offsets_are_where_tokens_stand_in_the_text(size: int) -> None:
    """Also where characters take several tokens, in whole answers as in chunks."""
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    text = "\u65e5\u672c = 1, \u00e9 x"
    tokens = tokenizer.encode(text)
    answering = Answering(SamplingParams(logprobs=0, n=2), stream=False, include_usage=False, return_token_ids=False)
    answer = CompletionAnswer("model", tokenizer, answering, [[5]])
    pieces = []
    for start in range(0, len(tokens), size):
        part = tuple(tokens[start : start + size])
        logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in part)
        reason = "length" if start + size >= len(tokens) else None
        pieces.append(CompletionDelta(1, 1, part, "", RequestStatistics(), logprobs, reason, None, ""))
    chunks = [chunk for piece in pieces for chunk in answer.chunks(piece)]
    streamed = [offset for chunk in chunks if chunk for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    answer = CompletionAnswer("model", tokenizer, answering, [[5]])
    for piece in pieces:
        answer.keep(msgspec.structs.replace(piece, index=0))
        answer.keep(piece)
    whole = json.loads(b"".join(answer.whole(Usage(1), 0)))["choices"][1]["logprobs"]
    assert streamed == whole["text_offset"] and len(streamed) == len(tokens) > len(text)
    assert streamed[:7] == [0, 0, 0, 1, 1, 1, 2]
    for offset, token in zip(streamed, whole["tokens"], strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)
