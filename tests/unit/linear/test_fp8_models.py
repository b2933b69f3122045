"""Models with weights in E4M3: their bytes, how near they are to the dense ones, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from fp8_products import NAMES, numbers
from paged import PagedModel
from safetensors.torch import load_file, save_file

from trtrun.errors import CheckpointError, ConfigError
from trtrun.linear.quantization import QUANTIZATIONS, find_quantization
from trtrun.loading.loading import shard_bytes
from trtrun.models.config import read_model_config
from trtrun.tensors import dtype_name


def test_a_head_of_codes_is_counted_and_multiplies_rounded(tmp_path: Path) -> None:
    """The layers are those of `fp8`; logits are near the dense ones, and a tied embedding stays as it is beside it."""
    config, hidden = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=True)), numbers(3, 64, seed=1)
    fp8, with_head = (
        shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cuda", 0), name) for name in ("fp8", "fp8_with_head")
    )
    assert with_head == fp8 + 199 * 64 + 4 * 199
    dense, rounded = (PagedModel(tmp_path, torch.bfloat16, quantization=name) for name in ("fp8", "fp8_with_head"))
    expected, found = (model.models[0].logits(hidden).float() for model in (dense, rounded))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_they_are_held_and_the_head_stays_dense(tmp_path: Path, tied: bool, name: str) -> None:
    """A byte a weight and four an output feature, in the linear layers of the decoder's layers alone."""
    config = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=tied))
    layers = config.num_layers
    features, inputs = [2 * 64, 64, 2 * 112, 64] * layers, [64, 64, 64, 112] * layers
    held = sum(one * other + 4 * one for one, other in zip(features, inputs, strict=True))
    plain, head = (199 * 64 + (2 * layers + 1) * 64) * 2, 199 * 64 * 2
    on_cpu = shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cpu"), name)
    on_gpu = shard_bytes(config, 0, 1, torch.bfloat16, torch.device("cuda", 0), name)
    is_shared = tied and QUANTIZATIONS.get("none").keeps_dense(torch.bfloat16, torch.device("cpu"))
    assert on_cpu == plain + (0 if is_shared else head) + held
    assert on_gpu == plain + (0 if tied else head) + held
    model = PagedModel(tmp_path, torch.bfloat16, quantization=name)
    assert model.reports[0].shard_bytes == on_cpu
    dense = PagedModel(tmp_path, torch.bfloat16)
    hidden = numbers(3, 64, seed=1)
    assert torch.equal(model.models[0].logits(hidden), dense.models[0].logits(hidden))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_models_are_near_the_dense_ones_whatever_the_files_hold(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    path = make_checkpoint(tmp_path, dtype=stored)
    batch = [[(0, 0, [5, 9, 77, 3])]]
    exact = PagedModel(path, torch.bfloat16).forward(batch)
    for tp_size in (1, 2):
        found = PagedModel(path, torch.bfloat16, tp_size=tp_size, quantization=name).forward(batch)
        difference = float((found - exact).norm() / exact.norm())
        assert 0.001 < difference < 0.15


def test_dummy_weights_are_rounded_like_any(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    batch = [[(0, 0, [5, 9, 77, 3])]]
    exact, found = (
        PagedModel(path, torch.bfloat16, quantization=name, load_format="dummy").forward(batch)
        for name in ("none", "fp8")
    )
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.15


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = math.nan
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.1.mlp.down_proj.weight' holds NaN"):
        PagedModel(tmp_path, torch.bfloat16, quantization="fp8")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "device", "fits"), [
    (torch.bfloat16, "cpu", True), (torch.float16, "cpu", False), (torch.float32, "cpu", False),
    (torch.bfloat16, "cuda", True), (torch.float16, "cuda", True), (torch.float32, "cuda", False),
])  # fmt: skip
def test_dtypes_that_would_be_slower_are_refused(name: str, dtype: torch.dtype, device: str, fits: bool) -> None:
    if fits:
        QUANTIZATIONS.get(name).check(dtype_name(dtype), device)
        return
    with pytest.raises(ConfigError, match=rf"quantization {name} computes in bfloat16.*, not in float.*: set dtype to"):
        QUANTIZATIONS.get(name).check(dtype_name(dtype), device)


def test_targets_are_refused_what_is_for_drafts_alone() -> None:
    for name in ("none", "fp8_with_head", *NAMES):
        assert find_quantization(name, for_target=True) is QUANTIZATIONS.get(name)
    assert find_quantization("int8", for_target=False) is QUANTIZATIONS.get("int8")
    allowed = "use one of fp8, fp8_block, fp8_weight_only, fp8_with_head, none"
    with pytest.raises(ConfigError, match=rf"int8 is for drafts alone, .*: {allowed}"):
        find_quantization("int8", for_target=True)
