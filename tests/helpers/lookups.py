"""Texts that repeat themselves, and what every method that looks texts up must show on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines import Reference, make_llm, prompt_of, run_alone, tokens_of

from trtrun import LLM, SamplingParams

COUNT = 40
SCHEDULER = {"max_batch_size": 4, "max_num_tokens": 48}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.9, "top_p": 0.9, "n": 3},
    {"temperature": 0.5, "repetition_penalty": 0.9, "logprobs": 2},
    {"stop_token_ids": (7, 8, 9)},
    {"temperature": 0.2, "min_tokens": 5, "frequency_penalty": -0.5},
]


def repeated_prompts() -> list[list[int]]:
    """Prompts of which half say the same several times."""
    lengths = (1, 2, 17, 11, 64, 30)
    return [prompt_of(length, seed=length) * (1 + 2 * (place % 2)) for place, length in enumerate(lengths)]


def generate(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Greedy texts of them."""
    tokens = tokens_of(llm.generate(repeated_prompts(), SamplingParams(max_tokens=COUNT)))
    llm.check_idle()
    return tokens


def check_greedy(target: Path, speculation: dict[str, Any], plans_ahead: int, **drafts: Any) -> dict[str, Any]:
    """Texts are transformers', with prefill in chunks, more prompts than rows, prefixes in use twice; some drafts are
    right, and some are not. `drafts` are a draft or heads. Returns the statistics."""
    reference = Reference(target)
    expected = [[reference.greedy(prompt, COUNT)] for prompt in repeated_prompts()]
    scheduler = {**SCHEDULER, "plans_ahead": plans_ahead}
    with make_llm(target, speculation={**speculation, "draft_len": 3}, scheduler=scheduler, **drafts) as llm:
        assert generate(llm) == expected
        assert generate(llm) == expected
        statistics = llm.statistics()
    assert 0 < statistics["num_accepted_draft_tokens"] < statistics["num_draft_tokens"]
    return statistics


def check_sampled(target: Path, speculation: dict[str, Any], plans_ahead: int, **drafts: Any) -> dict[str, Any]:
    """Texts are the target's own, whatever the batch and who is preempted. `drafts` are a draft or heads. Returns the
    statistics."""
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, **kind) for index, kind in enumerate(KINDS)]
    with make_llm(target) as llm:
        expected = run_alone(llm, repeated_prompts(), sampling)
    sections: dict[str, Any] = {
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 144, "block_size": 8},
    }
    with make_llm(target, speculation=speculation, **sections, **drafts) as llm:
        outputs = llm.generate(repeated_prompts(), sampling)
        llm.check_idle()
        statistics = llm.statistics()
    assert statistics["num_accepted_draft_tokens"] > 10
    assert tokens_of(outputs) == expected
    assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
    return statistics
