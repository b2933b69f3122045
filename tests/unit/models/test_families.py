"""Families by what transformers makes of them: logits and greedy texts, in shares, over chunks and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILIES, write_family
from paged import PagedModel
from pipelines import make_llm, noisy_copy, run_alone, tokens_of
from test_model_invariance import check_chunks, dtype
from test_model_logits import check_logits, prompt_of, reference_greedy

from trtrun import SamplingParams

__all__ = ["dtype"]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str, tp_size: int) -> None:
    check_logits(write_family(tmp_path, family, tie_word_embeddings=tp_size == 2), tp_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path, family, seed=3)
    prompt = prompt_of(13, seed=3)
    model = PagedModel(path)
    logits, text = model.forward([[(0, 0, prompt)]]), []
    for position in range(len(prompt), len(prompt) + 40):
        text.append(int(logits[-1].argmax()))
        logits = model.forward([[(0, position, text[-1:])]])
    assert text == reference_greedy(path, prompt, 40)
    assert len(set(text)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokens_bits_do_not_depend_on_its_company(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    check_chunks(PagedModel(write_family(tmp_path, family, dtype=dtype), dtype, block_size=16))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_texts_are_plain_ones(tmp_path: Path, family: str) -> None:
    """In bfloat16, of rows that run together, with a draft model of the family and with texts' own, among preempted
    rows."""
    target = write_family(tmp_path / "target", family, dtype=torch.bfloat16)
    draft = noisy_copy(tmp_path / "draft", target, 0.1)
    prompts = [prompt_of(length, seed=length) * 2 for length in (3, 17, 29)]
    sampling = [SamplingParams(max_tokens=40), *[SamplingParams(max_tokens=40, temperature=0.8, seed=1)] * 2]
    with make_llm(target, speculation={"method": "none"}, dtype="bfloat16") as llm:
        alone = run_alone(llm, prompts, sampling)
    for method in ("none", "draft_target", "ngram"):
        of_model = {"draft": draft} if method == "draft_target" else {}
        with make_llm(
            target, **of_model, speculation={"method": method}, dtype="bfloat16", kv_cache={"max_tokens": 160}
        ) as llm:
            assert tokens_of(llm.generate(prompts, sampling)) == alone, method
            assert method != "draft_target" or llm.statistics()["num_accepted_draft_tokens"] > 3
