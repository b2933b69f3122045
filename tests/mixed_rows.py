"""Rows of many kinds in one batch, for methods that draft with heads: prompts, and how each is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines import make_llm, prompt_of, tokens_of

from trtrun import SamplingParams

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"logprobs": 3},
    {"temperature": 0.5, "repetition_penalty": 0.9, "logprobs": 2},
    {"temperature": 0.2, "frequency_penalty": -0.5, "presence_penalty": 0.3},
    {"logit_bias": {7: 4.0, 9: -3.0}, "stop_token_ids": (11,)},
    {"temperature": 0.7, "n": 2},
]
PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 64, 17, 31)]


def mixed_sampling(count: int) -> list[SamplingParams]:
    """One for each prompt, of up to `count` tokens, and of one three quarters of them at least."""
    found = [SamplingParams(max_tokens=count, ignore_eos=True, seed=index, **kind) for index, kind in enumerate(KINDS)]
    found[5] = replace(found[5], min_tokens=count * 3 // 4)
    return found


def plain_tokens(target: Path, sampling: Sequence[SamplingParams]) -> list[list[tuple[int, ...]]]:
    """The target's own texts."""
    with make_llm(target) as llm:
        return tokens_of(llm.generate(PROMPTS, list(sampling)))


def whole_texts(texts: list[list[tuple[int, ...]]]) -> list[list[int]]:
    """Each text behind its prompt."""
    return [[*prompt, *text] for prompt, found in zip(PROMPTS, texts, strict=True) for text in found]
