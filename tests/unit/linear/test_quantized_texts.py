"""Texts of checkpoints that others have quantized: transformers' of the same numbers, and speculative ones plain ones.

tests/helpers/quantized_checkpoints.py writes them, in every format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from paged import PagedModel
from pipelines import Reference, make_llm, noisy_copy, prompt_of, tokens_of
from quantized_checkpoints import FORMATS, make_pair

from trtrun import SamplingParams

LAYOUTS = (
    "compressed-tensors FP8",
    "compressed-tensors W8A8",
    "compressed-tensors W4A16 with zero points",
    "compressed-tensors W4A16 with act-order",
    "fp8 block",
    "modelopt FP8",
    "modelopt W4A16_AWQ",
    "awq",
    "gptq",
    "gptq with act-order",
)
"""Of each way to lie in files one."""
PROMPTS = [prompt_of(length) for length in (3, 20)]
COUNT = 16


def expected_texts(dense: Path) -> list[tuple[int, ...]]:
    """What transformers writes with the plain checkpoint of the same numbers, in float32."""
    reference = Reference(dense)
    return [reference.greedy(prompt, COUNT) for prompt in PROMPTS]


def greedy_texts(model: PagedModel, prompts: Sequence[list[int]], count: int) -> list[tuple[int, ...]]:
    """Of all prompts at once: these in one forward, then a token of each in one."""
    ends = torch.tensor([len(prompt) for prompt in prompts])
    logits = model.forward([[(row, 0, prompt)] for row, prompt in enumerate(prompts)])[ends.cumsum(0) - 1]
    texts = [logits.argmax(1).tolist()]
    for step in range(count - 1):
        rows = [(row, int(end) + step, [texts[-1][row]]) for row, end in enumerate(ends)]
        texts.append(model.forward([rows]).argmax(1).tolist())
    return list(zip(*texts, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_texts_are_those_of_transformers_with_the_dense_weights(tmp_path: Path, name: str) -> None:
    """In float32 on the CPU, by 1, 2 and 4 ranks."""
    stored, dense = make_pair(tmp_path, name)
    expected = expected_texts(dense)
    for tp_size in (1, 2, 4):
        assert greedy_texts(PagedModel(stored, tp_size=tp_size), PROMPTS, COUNT) == expected, tp_size


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_target_and_a_draft_may_be_quantized(tmp_path: Path, name: str) -> None:
    stored, dense = make_pair(tmp_path, name)
    expected = [[text] for text in expected_texts(dense)]
    greedy = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with make_llm(stored) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy)) == expected
    with make_llm(stored, noisy_copy(tmp_path / "draft", dense, 0.02)) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 3
    with make_llm(dense, stored) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy)) == expected
        drafted = llm.statistics()
        assert drafted["num_accepted_draft_tokens"] == drafted["num_draft_tokens"] > 0


@pytest.mark.parametrize("name", ["awq", "fp8 block"])
def test_speculative_texts_in_bfloat16_are_plain_ones(tmp_path: Path, name: str) -> None:
    """To the token, greedy and by seed: 1, 8, 32 and 64 rows at once; prompts in chunks, prefixes in use by several
    rows, preempted rows."""
    stored, dense = make_pair(tmp_path, name)
    draft = noisy_copy(tmp_path / "draft", dense, 0.02)
    shared = prompt_of(40, seed=9)
    prompts = [(shared if index % 3 == 0 else []) + prompt_of(3 + 5 * (index % 8), index) for index in range(64)]
    sampling = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(64)
    ]
    texts, accepted, cached, preempted = [], 0, 0, 0
    for rows, model in ((64, None), (1, None), (1, draft), (8, draft), (32, draft), (64, draft)):
        count = 16 if rows == 1 else 64
        settings = {
            "scheduler": {"max_batch_size": rows, "max_num_tokens": 40 + 5 * rows},
            "kv_cache": {"max_tokens": max(112, 18 * rows), "block_size": 8},
        }
        with make_llm(stored, model, dtype="bfloat16", **settings) as llm:
            outputs = llm.generate(prompts[:count], sampling[:count])
            texts.append(tokens_of(outputs))
            assert texts[-1] == texts[0][:count], rows
            accepted += llm.statistics()["num_accepted_draft_tokens"]
            llm.check_idle()
        statistics = [output.completions[0].statistics for output in outputs]
        preempted += sum(it.num_preemptions for it in statistics)
        cached += sum(it.num_cached_prompt_tokens for it in statistics)
    assert accepted > 300 and cached > 300 and preempted
