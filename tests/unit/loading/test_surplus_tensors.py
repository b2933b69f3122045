"""Files of a tied model that hold a vocabulary head of their own, and of models with tensors that no weight has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from paged import PagedModel
from safetensors.torch import load_file, save_file

from trtrun.errors import CheckpointError


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("is_another", [True, False], ids=["another", "the embedding"])
def test_another_head_is_not_passed_over(tmp_path: Path, is_another: bool, tp_size: int) -> None:
    """transformers takes it; and what many files have besides, the embedding again, is none."""
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    config, weights = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    if not is_another:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "model.safetensors")
        model = PagedModel(tmp_path, torch.float32, tp_size)
        assert model is not None
        return
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is not the embedding, and config.json says that it"):
        PagedModel(tmp_path, torch.float32, tp_size)


@pytest.mark.parametrize(
    ("name", "value", "is_told"),
    [
        ("model.layers.1.self_attn.q_norm.weight", 1.0, True),
        ("model.layers.1.mlp.up_proj.bias", 0.5, True),
        ("model.layers.1.mlp.up_proj.bias", 0.0, False),
        ("model.layers.1.self_attn.k_scale", 1.0, False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", 1.0, False),
        ("model.layers.9.self_attn.q_norm.weight", 1.0, False),
        ("vision.layers.1.norm.weight", 1.0, False),
    ],
)
def test_tensors_that_no_weight_has_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: float, is_told: bool
) -> None:
    """Once, by the first rank: a norm or a bias that is there changes texts. Not what lies beside the model's layers,
    and what changes nothing."""
    make_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: torch.full((8,), value)}, tmp_path / "model.safetensors")
    PagedModel(tmp_path, torch.float32, 2)
    told = [record.getMessage() for record in caplog.records]
    assert [f"{tmp_path} has {name}, which config.json does not call for" in line for line in told] == [True] * is_told


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_nothing_is_told_of_what_families_write(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str) -> None:
    PagedModel(write_family(tmp_path, family), torch.float32)
    assert not [record for record in caplog.records if record.name.startswith("trtrun")]
