"""Layers that keep a state of each row beside layers that attend (tests/helpers/decaying_family.py): texts are those of
one token at a time, whatever else happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decaying_family import DecayingReference, decaying_family, make_decaying_checkpoint
from paged import PagedModel
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of
from test_model_invariance import check_chunks, check_company, dtype

from trtrun import SamplingParams

__all__ = ["dtype"]


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with decaying_family():
        yield


@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_those_of_plain_torch(tmp_path: Path, tp_size: int) -> None:
    path, tokens = make_decaying_checkpoint(tmp_path / "own"), prompt_of(41)
    model = PagedModel(path, tp_size=tp_size)
    parts = [model.forward([[(0, 0, tokens[:17])]]), model.forward([[(0, 17, tokens[17:30])]])]
    parts += [model.forward([[(0, at, tokens[at : at + 1])]]) for at in range(30, 41)]
    torch.testing.assert_close(torch.cat(parts), DecayingReference(path).logits(tokens), atol=1e-4, rtol=1e-4)


def test_a_tokens_bits_do_not_depend_on_its_company(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_decaying_checkpoint(tmp_path / "own", dtype=dtype)
    check_chunks(PagedModel(path, dtype, block_size=16))
    check_company(path, dtype)


VOCABULARY = 19
PROMPTS = [prompt_of(length, length, VOCABULARY) * 2 for length in (3, 17, 29, 8)]
KINDS = [SamplingParams(max_tokens=40, temperature=0.8 * (row % 2), seed=row) for row in range(4)]


def check_texts(target: Path, draft: Path | None = None, *, least_accepted: int = 10, **sections: Any) -> None:
    """Texts of rows that run together are those of plain decoding, each alone, one token at a time."""
    with make_llm(target, speculation={"method": "none"}) as llm:
        alone = run_alone(llm, PROMPTS, KINDS)
    with make_llm(target, draft, **sections) as llm:
        assert tokens_of(llm.generate(PROMPTS, KINDS)) == alone
        assert llm.statistics()["num_accepted_draft_tokens"] > least_accepted


def test_greedy_texts_are_those_of_plain_torch(tmp_path: Path) -> None:
    path = make_decaying_checkpoint(tmp_path / "own")
    with make_llm(path, speculation={"method": "ngram"}) as llm:
        found = tokens_of(llm.generate(PROMPTS, SamplingParams(max_tokens=40)))
    reference = DecayingReference(path)
    assert found == [[reference.greedy(prompt, 40)] for prompt in PROMPTS]


@pytest.mark.parametrize("method", ["ngram", "draft_target", "suffix"])
@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_drafted_texts_are_plain_ones(tmp_path: Path, dtype: torch.dtype, method: str, plans_ahead: int) -> None:
    """Drafts are rejected often; prompts are read in small chunks beside rows that decode, and rows are preempted."""
    target = make_decaying_checkpoint(tmp_path / "target", dtype=dtype, vocab_size=VOCABULARY)
    draft = noisy_copy(tmp_path / "draft", target, 0.05) if method == "draft_target" else None
    check_texts(
        target,
        draft,
        speculation={"draft_len": 4} if draft is not None else {"method": method, "draft_len": 4},
        scheduler={"max_num_tokens": 24, "max_batch_size": 4, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": 160, "block_size": 8},
        least_accepted=3,
    )
