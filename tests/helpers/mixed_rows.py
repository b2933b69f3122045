"""Rows of many kinds in one batch, for methods that draft with heads: prompts, and how each is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint, overflow_on
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
WITH_TEXTS: dict[str, Any] = {
    "enable_suffix_decoding": True,
    "suffix_decoding_min_match_len": 2,
    "suffix_decoding_max_cached_requests": 9,
}
"""Options of a method by which some drafts are what texts repeat."""

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


def check_texts(
    target: Path,
    heads: Path,
    speculation: dict[str, Any],
    settings: dict[str, Any],
    sampling: Sequence[SamplingParams],
    *,
    least_accepted: int,
    with_texts: bool = False,
    told: Callable[[Any], Any] = tokens_of,
) -> None:
    """What `told` says of a target's texts, drafted for with heads, is what it says without them: in company,
    preempted, prefixes in use twice, prompts in chunks, by the limits of `settings`. With `with_texts` some drafts are
    what texts repeat."""
    rows = list(sampling)
    with make_llm(target, **settings) as llm:
        expected = told(llm.generate(PROMPTS, rows))
    with make_llm(target, heads=heads, speculation=speculation, **settings) as llm:
        outputs = llm.generate(PROMPTS, rows)
        assert told(outputs) == expected
        assert told(llm.generate(PROMPTS, rows)) == expected
        statistics = llm.statistics()
        assert statistics["num_accepted_draft_tokens"] > least_accepted
        assert (statistics["num_accepted_suffix_draft_tokens"] > 20) == with_texts
        assert statistics["num_suffix_draft_tokens"] < statistics["num_draft_tokens"]
        assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
        llm.check_idle()
        llm.set_speculation(False)
        assert told(llm.generate(PROMPTS, rows)) == expected


POISON = 7
"""A token that rows overflow on."""


def make_overflowing(path: Path, **config: Any) -> Path:
    """Write a checkpoint whose rows overflow on POISON."""
    make_checkpoint(path, seed=1, **config)
    overflow_on(path, POISON)
    return path


def generate_beside_overflow(target: Path, heads: Path, speculation: dict[str, Any], scheduler: dict[str, Any]) -> None:
    """Rows beside and after some that overflow, by heads that draft; these alone fail."""
    healthy = [[token if token != POISON else 8 for token in prompt] for prompt in PROMPTS[:5]]
    cache = {"max_tokens": 144, "enable_block_reuse": False}
    sampling = SamplingParams(max_tokens=8, logit_bias={POISON: -100.0})
    prompts = [[POISON] * 40, healthy[0], [*healthy[1], *[POISON] * 20], *healthy[1:]]
    with make_llm(target, heads=heads, speculation=speculation, scheduler=scheduler, kv_cache=cache) as llm:
        outputs = llm.generate(prompts, sampling)
        assert [output.error is None for output in outputs] == [False, True, False, *[True] * 4]
