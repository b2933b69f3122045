"""Families by what transformers makes of them: logits and greedy texts, in shares, over chunks and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_checkpoints import FAMILIES, NESTED, write_family
from paged import PagedModel
from test_model_logits import check_logits, prompt_of, reference_greedy


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", [*FAMILIES, *NESTED])
def test_logits_equal_transformers(tmp_path: Path, family: str, tp_size: int) -> None:
    check_logits(write_family(tmp_path, family, tie_word_embeddings=tp_size == 2), tp_size)


@pytest.mark.parametrize("family", [*FAMILIES, *NESTED])
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
