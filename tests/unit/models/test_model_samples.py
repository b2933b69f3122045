"""By what a training run that goes on knows its models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from checkpoints import make_checkpoint

from trtrun.weights.model_files import hash_model_samples


def test_a_copy_is_the_same_model_and_other_weights_are_another(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", seed=1, num_shards=2)
    first = hash_model_samples(model)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert hash_model_samples(copy) == first
    file = sorted(copy.glob("*.safetensors"))[1]
    *others, last = file.read_bytes()
    file.write_bytes(bytes([*others, last ^ 1]))  # as of a fine-tune: the same names and sizes
    assert hash_model_samples(copy) != first
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert hash_model_samples(model) != first
    assert hash_model_samples(make_checkpoint(tmp_path / "other", seed=2, num_shards=2)) != first
