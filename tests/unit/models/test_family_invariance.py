"""A token's result is bit-equal alone, in chunks and in company in families whose layers compute what no other does,
with sizes that fill no register; test_families.py has others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from native import PATHS, PROCESSORS
from paged import PagedModel
from test_model_invariance import LENGTH, check_chunks, choose_kernels, tokens_of

ODD: dict[str, Any] = {"hidden_size": 60, "intermediate_size": 118, "head_dim": 10, "num_attention_heads": 6}
"""Sizes that are no multiples of a vector register, so that vectorised loops have scalar tails."""
KERNELS = [
    *(pytest.param(kind, torch.bfloat16, marks=needed) for kind, needed in PATHS.items()),
    ("torch", torch.bfloat16),
    pytest.param("avx2", torch.float32, marks=PROCESSORS["avx2"]),
]


@pytest.mark.parametrize(("kind", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize(
    ("family", "tp_size"),
    [("apertus", 1), ("deepseek_v3", 2), ("gemma4_small", 1), ("gpt_oss", 2), ("olmo2", 1), ("olmo3", 2), ("phi3", 1)],
)
def test_logits_do_not_depend_on_the_batch(
    tmp_path: Path,
    family: str,
    tp_size: int,
    kind: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_kernels(kind, monkeypatch)
    sizes = ODD
    if family == "phi3":
        sizes = {**ODD, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.6}}
    if family == "deepseek_v3":
        sizes = {**ODD, "num_key_value_heads": 6}
    if family == "gemma4_small":
        kinds = ["sliding_attention", "full_attention"] * 2
        sizes = {**ODD, "num_hidden_layers": 4, "layer_types": kinds, "hidden_size_per_layer_input": 11}
    path = write_family(tmp_path, family, dtype=dtype, **{"num_hidden_layers": 2, **sizes})
    model = PagedModel(path, dtype, tp_size, block_size=16)
    check_chunks(model)
    texts = {row: tokens_of(row) for row in range(10, 13)}
    alone = {row: model.forward([[(row, 0, tokens)]]) for row, tokens in texts.items()}
    together = model.forward([[(20 + row, 0, tokens) for row, tokens in texts.items()]])
    assert torch.equal(together, torch.cat(list(alone.values())))
    assert len(together) == 3 * LENGTH
