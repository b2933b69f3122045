"""A row whose numbers overflow ends with an error, and leaves nothing behind that the rows after it could see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_draft, overflow_on
from pipelines import make_llm, prompt_of

from trtrun import LLM, SamplingParams
from trtrun.api.deltas import NOT_FINITE
from trtrun.core.outputs import NONE_ALLOWED

POISON = 7
"""A token whose keys and values are infinite in the target's first layer."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("failed") / "target", seed=1)
    overflow_on(path, POISON)
    return path


def healthy(index: int) -> list[int]:
    return [token if token != POISON else POISON + 1 for token in prompt_of(5 + 3 * index, seed=index)]


def run(llm: LLM, prompts: list[list[int]], **others: Any) -> list[tuple[int, ...] | str]:
    """Tokens or the error of each prompt."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, **others))
    return [output.error or output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_that_may_choose_no_token_ends_with_an_error(tmp_path: Path, drafts: bool) -> None:
    """Tokens but for one are held back until min_tokens are out, and this one may not come twice."""
    path = make_checkpoint(tmp_path / "target", seed=1, tokenizer=True, eos_token_id=0)
    with make_llm(path, make_draft(tmp_path / "draft", path, 1) if drafts else None) as llm:
        assert llm.tokenizer is not None
        (token,) = llm.tokenizer.encode("a", add_special_tokens=False)
        others = [other for other in range(260) if other != token]
        held = SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=others, ignore_eos=True)
        once = SamplingParams(
            max_tokens=8, min_tokens=4, stop_token_ids=others, ignore_eos=True, bad_words=("aa",), temperature=0.5
        )
        free, failed = llm.generate(["b", "b"], [held, once])
        assert free.error is None and free.completions[0].token_ids[:4] == (token,) * 4
        assert failed.error == NONE_ALLOWED
        (refused,) = llm.generate(["b"], replace(held, stop_token_ids=range(260)))
        assert refused.error is not None and "all 260 tokens of the model: none is left" in refused.error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_rows_after_a_failed_one_are_as_before_it(
    target: Path, tmp_path: Path, dtype: str, reuse: bool, drafts: bool
) -> None:
    with make_llm(
        target,
        make_draft(tmp_path / "draft", target, 1) if drafts else None,
        dtype=dtype,
        kv_cache={"max_tokens": 192, "enable_block_reuse": reuse},
        scheduler={"max_batch_size": 3, "max_num_tokens": 64},
    ) as llm:
        prompts = [healthy(index) for index in range(3)]
        expected = run(llm, prompts)
        assert all(isinstance(tokens, tuple) for tokens in expected)
        poisoned = [*healthy(9)[:20], *[POISON] * 15]
        for _ in range(2):  # again over the blocks that it may share with itself
            error, beside = run(llm, [poisoned, prompts[1]])
            assert isinstance(error, str) and error == NOT_FINITE
            assert beside == expected[1]
            # Nor is it its parameters' fault where they forbid some tokens alone.
            assert run(llm, [poisoned], min_tokens=6, stop_token_ids=[1, 2, 3]) == [NOT_FINITE]
            assert all(isinstance(answer, str) for answer in run(llm, [[POISON] * 40] * 3)), "every block of the store"
            assert run(llm, prompts) == expected


def test_blocks_of_a_failed_row_are_offered_no_more(target: Path) -> None:
    """Of its first chunk, where kernels on CPUs go through tokens before the poison together with it."""
    scheduler, cache = {"max_batch_size": 3, "max_num_tokens": 37}, {"max_tokens": 512, "block_size": 4}
    with make_llm(target, scheduler=scheduler, kv_cache=cache, dtype="bfloat16") as llm:
        prompt = healthy(9)[:20]
        assert run(llm, [[*prompt, *[POISON] * 20]]) == [NOT_FINITE]
        assert run(llm, [prompt]) == run(llm, [prompt], cache_salt="of its own") != [NOT_FINITE]


@pytest.mark.parametrize(("reuse", "plans_ahead"), [(False, 1), (True, 0)])
def test_places_that_failed_rows_got_for_later_chunks_are_cleared_before_others_have_them(
    tmp_path: Path, reuse: bool, plans_ahead: int
) -> None:
    """Two rows that fail in chunks; kernels on CPUs read whole blocks, and what is no number stays none times 0."""
    windowed = make_checkpoint(tmp_path / "target", "MistralForCausalLM", seed=1, sliding_window=8)
    overflow_on(windowed, POISON)
    tokens = [token for index in range(12) for token in healthy(index)]
    prompts = [tokens[:length] for length in (17, 20, 33, 37, 49, 53, 70)]
    with make_llm(
        windowed,
        kv_cache={"max_tokens": 4096, "enable_block_reuse": reuse, "block_size": 16},
        scheduler={"max_batch_size": 2, "max_num_tokens": 16, "plans_ahead": plans_ahead},
    ) as llm:
        expected = run(llm, prompts)
        for _ in range(2):
            assert run(llm, [[*tokens[:5], *[POISON] * count] for count in (60, 90)]) == [NOT_FINITE] * 2
            assert run(llm, prompts) == expected


@pytest.mark.parametrize("reuse", [False, True])
def test_places_of_a_failed_row_are_as_before_it(tmp_path: Path, reuse: bool) -> None:
    """Those of layers with windows, which rows are given while they read: few enough that all have been its own."""
    windowed = make_checkpoint(tmp_path / "target", "MistralForCausalLM", seed=1, sliding_window=8)
    overflow_on(windowed, POISON)
    with make_llm(
        windowed,
        kv_cache={"max_tokens": 4096, "enable_block_reuse": reuse},
        scheduler={"max_batch_size": 1, "max_num_tokens": 16},
    ) as llm:
        prompts = [[*healthy(9), *healthy(index)] for index in range(3)]
        expected = run(llm, prompts)
        for _ in range(2):
            assert run(llm, [[*prompts[0], *[POISON] * 40]]) == [NOT_FINITE]
            assert run(llm, prompts) == expected
