"""Files of a tied model that hold a vocabulary head of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
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
