"""Quantized weights whose rows ranks hold in another order than files, as they lie on GPUs. What CPUs make of them is
in test_family_tools.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from quantized_checkpoints import FORMATS, RATES, leave_plain, store_in_format
from test_quantized_experts import dense_of

from trtrun.kernels.torch.integers import dequantize
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import TensorSlice, count_bytes
from trtrun.linear.stored.layout import StoredLinear, cut_groups
from trtrun.linear.stored.pieces import pieces_of
from trtrun.loading.stored_report import describe_stored
from trtrun.models.config import read_model_config
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share
from trtrun.weights.weight_loader import CheckpointLoader

SIZES: dict[str, Any] = {
    "vocab_size": 224,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 2,
}
"""Whole blocks and tiles, but for parts of heads."""


@pytest.mark.parametrize(
    ("family", "form", "tp_size", "dense_ones"),
    [
        ("qwen3_next", "fp8 block", 1, {"q_proj"}),
        ("qwen3_5_text", "fp8 block", 2, {"q_proj"}),
        ("qwen3_5_text", "compressed-tensors W4A16 with zero points", 2, set()),
        ("glm4_moe", "compressed-tensors FP8 dynamic", 2, set()),
    ],
)
def test_gpus_hold_codes_in_the_order_of_ranks(
    tmp_path: Path, family: str, form: str, tp_size: int, dense_ones: set[str]
) -> None:
    """With scales of rows beside them; of blocks those that move whole. What is cut from its block becomes dense, and
    that is said."""
    dense, stored = write_family(tmp_path / "dense", family, **SIZES), tmp_path / "stored"
    shutil.copytree(dense, stored)
    store_in_format(dense, stored, leave_plain(FORMATS[form], *RATES))
    config, share, found = read_model_config(stored), Share(tp_size - 1, tp_size), set()
    kept, plain = (
        CheckpointLoader(
            open_checkpoint(path), share, torch.device("cpu"), dtype,
            lambda weight: config.quantization_of(weight, QUANTIZATIONS.get("none")), 1, None, "cuda",
        )
        for path, dtype in ((stored, torch.bfloat16), (dense, torch.float32))
    )  # fmt: skip
    for weight in config.weights:
        held, cut = kept.held(weight), weight.cut(share)
        if not isinstance(held, StoredLinear):
            continue
        tensors, expected = dict(kept.load(weight)), plain.tensor(weight)
        if "words" in tensors and weight.use != "expert":
            inputs = cut.shape[1]
            numbers = dequantize(tensors["words"], tensors["scales"], inputs, torch.bfloat16).float()
        else:
            numbers = dense_of(tensors, cut.shape)
        assert (numbers - expected).norm() < 0.004 * expected.norm()
        created = count_bytes(held.create(cut, torch.bfloat16, "cuda"))
        assert created == sum(it.numel() * it.itemsize for it in tensors.values())
        found |= {weight.parts[0].name.split(".")[-2]} if "weight" in tensors else set()
    assert found == dense_ones
    said = str(describe_stored(config, share, torch.bfloat16, "cuda"))
    assert "stay as they are" in said and ("as heads are held in another order" in said) == bool(dense_ones)


def test_rows_that_lie_together_are_read_together_and_once() -> None:
    """In whole blocks, unless they lie as the rank holds them; what lies apart is read apart."""

    def rows(name: str, *ranges: range) -> list[TensorSlice]:
        return [TensorSlice(name, (300, 8), (it, range(8))) for it in ranges]

    parts = [*rows("q", range(160, 192), range(0), range(130, 160)), *rows("k", range(4, 8), range(8, 12), range(2))]
    read = [(it.part.name, it.part.ranges[0], it.rows) for it in pieces_of(parts)]
    assert read == [("q", range(128, 256), 62), ("k", range(4, 12), 8), ("k", range(2), 2)]
    moved = pieces_of(rows("q", range(200, 300), range(130, 200)))[0]
    assert moved.part.ranges[0] == range(128, 300) and moved.moves_parts_of_blocks
    assert cut_groups(moved.part, 0, 128) == range(1, 3)
    assert moved.index(torch.device("cpu")).tolist() == [*range(72, 172), *range(2, 72)]  # type: ignore[union-attr]
