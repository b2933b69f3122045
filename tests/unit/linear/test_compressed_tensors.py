"""What the compressed-tensors package writes is what is read here: its own compressors make the files, and its own
decompressors say what their numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from paged import PagedModel
from quantized_checkpoints import Format, make_pair
from quantized_writers import Tensors, Writer
from safetensors.torch import load_file

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
INTEGERS: dict[str, Any] = {"type": "int", "num_bits": 4}
FLOATS: dict[str, Any] = {"type": "float", "num_bits": 8}

SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": ("pack-quantized", {**INTEGERS, "strategy": "group", "group_size": 64}, None),
    "W4A16 asymmetric": (
        "pack-quantized", {**INTEGERS, "strategy": "group", "group_size": 32, "symmetric": False}, None,
    ),
    "W4A16 of whole rows": ("pack-quantized", {**INTEGERS, "strategy": "channel"}, None),
    "W8A16 asymmetric": (
        "pack-quantized", {**INTEGERS, "num_bits": 8, "strategy": "channel", "symmetric": False}, None,
    ),
    "W8A8": ("int-quantized", {**INTEGERS, "num_bits": 8, "strategy": "channel"}, {**PER_TOKEN, "type": "int"}),
    "FP8": ("float-quantized", {**FLOATS, "strategy": "tensor"}, {**FLOATS, "strategy": "tensor"}),
    "FP8 dynamic": ("float-quantized", {**FLOATS, "strategy": "channel"}, {**PER_TOKEN, "type": "float"}),
    "FP8 block": (
        "float-quantized",
        {**FLOATS, "strategy": "block", "block_structure": [128, 128]},
        {**FLOATS, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
}  # fmt: skip


def ranges_of(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest numbers that share a scale, in the shape of scales."""
    strategy, (features, inputs) = args.strategy, weight.shape
    if strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -features % rows))
        parts = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    elif strategy == "group":
        parts = weight.view(features, -1, args.group_size)
    else:
        parts = weight.view(features, 1, inputs) if strategy == "channel" else weight.reshape(1, -1)
    return parts.amin(dim=-1), parts.amax(dim=-1)


def by_the_package(kind: str, scheme: QuantizationScheme) -> Writer:
    """A matrix as it compresses it, and what it reads of that again."""
    compressor = BaseCompressor.get_value_from_registry(kind)

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        scale, zero = calculate_qparams(*ranges_of(weight, scheme.weights), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        made = compressor.compress(state, scheme)
        return made, compressor.decompress(made, scheme)["weight"].float()

    return write


@pytest.mark.parametrize("name", SCHEMES)
def test_its_files_are_read_to_the_bit(tmp_path: Path, name: str) -> None:
    kind, weights, activations = SCHEMES[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = QuantizationConfig(config_groups={"group_0": group}, format=kind, ignore=["lm_head"])
    values = config.model_dump(mode="json")
    made = Format(values, by_the_package(kind, config.config_groups["group_0"]))
    stored, dense = make_pair(tmp_path, made)
    assert any("weight_scale" in key for key in load_file(stored / "model.safetensors"))
    found, expected = (PagedModel(path).forward(BATCH) for path in (stored, dense))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "group"), [("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)])
def test_numbers_of_4_bits_with_an_exponent_are_its_own(kind: str, group: int) -> None:
    """It says them in bfloat16, to which ours are rounded."""
    from trtrun.linear.quantization.base import TensorSlice
    from trtrun.linear.stored.compressed_tensors import parse
    from trtrun.linear.stored.layout import StoredLinear

    torch.manual_seed(group)
    weight, strategy = torch.randn(24, 128), "tensor_group" if group == 16 else "group"
    args = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}
    config = QuantizationConfig(config_groups={"group_0": {"targets": ["Linear"], "weights": args}}, format=kind)
    scheme = config.config_groups["group_0"]
    most = weight.view(24, -1, group).abs().amax(-1) / 6
    state = {"weight": weight, "weight_scale": 2.0 ** most.log2().ceil()}
    if group == 16:
        state["weight_global_scale"] = 448 * 6 / weight.abs().amax().reshape(1)
        state["weight_scale"] = (most * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(kind)
    made = compressor.compress(state, scheme)
    expected = compressor.decompress(made, scheme)["weight"]

    stored = parse(config.model_dump(mode="json"))("model.layers.0.mlp.down_proj.weight")
    assert isinstance(stored, StoredLinear)
    part = TensorSlice("model.layers.0.mlp.down_proj.weight", (24, 128), (range(24), range(128)))
    slices = stored.layout.slices(part)
    found = stored.layout.form(part, {end: made[it.name.split("down_proj.")[1]] for end, it in slices.items()})
    assert found.shape == (24, 128)
    assert torch.equal(found.dequantize().bfloat16(), expected.bfloat16())
    assert (found.dequantize() - weight).norm() < 0.2 * weight.norm()
