"""A checkpoint says how it has stored each matrix; a kind of quantized checkpoint is one file, and touches no other.

The one of this file is not the product's: codes and scales in place of a matrix, and an ignore list of what is plain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from paged import PagedModel
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of
from safetensors.torch import load_file

from trtrun import SamplingParams
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kernels.torch.integers import quantize_int8
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import (
    STORED_QUANTIZATIONS,
    LinearWeight,
    Product,
    StoredQuantizations,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
)
from trtrun.loading.loading import shard_bytes
from trtrun.loading.weight_check import check_model_weights, choose_default
from trtrun.models.config import ModelConfig, read_model_config

DENSE = QUANTIZATIONS.get("none")
IGNORED = ("lm_head", *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"), "model.layers.1.mlp.down_proj")


class Codes:
    """Each matrix of the architecture is stored as codes [in, out] and scales [out], and computed as a dense one."""

    takes_head = True
    fits_targets = True

    def check(self, dtype: str, device_type: str) -> None:
        if dtype == "float16":
            raise ConfigError("codes are not multiplied in float16")

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        return False

    @staticmethod
    def _files(weight: LinearWeight) -> Sequence[tuple[TensorSlice, TensorSlice]]:
        """Codes and scales of each part of a fused weight."""
        found = []
        for part in weight.parts:
            start, (rows, columns), (out, inputs) = part.name.removesuffix("weight"), part.ranges, part.shape
            codes = TensorSlice(f"{start}codes", (inputs, out), (columns, rows))
            found.append((codes, TensorSlice(f"{start}scale", (out,), (rows,))))
        return found

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        return [part for pair in self._files(weight) for part in pair]

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        return {
            "codes": TensorSpec((weight.shape[1], weight.shape[0]), torch.float16),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        return 0

    def load(self, source: WeightSource) -> Tensors:
        """As they lie in the file, joined along `out`."""
        files = self._files(source.weight)
        codes = torch.cat([source.read(part) for part, _ in files], dim=1)
        return {"codes": codes, "scale": torch.cat([source.read(part) for _, part in files])}

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        weight = (tensors["codes"].float() * tensors["scale"]).T.contiguous()
        return DENSE.apply({"weight": weight}, bias, batch_invariant=batch_invariant)


def read_codes(values: Mapping[str, Any]) -> StoredQuantizations:
    """The quantization of each name, from config.json."""
    held, ignored = Codes(), {f"{name}.weight" for name in values["ignore"]}
    return lambda name: None if name in ignored else held


@pytest.fixture(autouse=True)
def codes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORED_QUANTIZATIONS._items, "codes", read_codes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of codes and scales, and the dense one of the same numbers."""
    options = {"attention_bias": True, "vocab_size": 200}
    config = {"quant_method": "codes", "ignore": IGNORED}
    codes_path = make_checkpoint(tmp_path / "codes", quantization_config=config, **options)
    dense_path = make_checkpoint(tmp_path / "dense", **options)
    held, plain = {}, {}
    for name, weight in load_file(dense_path / "model.safetensors").items():
        if "proj.weight" not in name or name.removesuffix(".weight") in IGNORED:
            held[name] = plain[name] = weight
            continue
        made = quantize_int8(weight)
        held[name.replace("weight", "codes")] = made["codes"].T.contiguous().half()
        held[name.replace("weight", "scale")] = made["scale"]
        plain[name] = made["codes"] * made["scale"].unsqueeze(1)
    save_weights(codes_path, held)
    save_weights(dense_path, plain)
    return codes_path, dense_path


def ignoring(path: Path, *names: str) -> ModelConfig:
    """The configuration of a checkpoint with another ignore list."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"]["ignore"] = names
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_model_config(path)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_each_matrix_is_read_as_it_is_stored(pair: tuple[Path, Path], tp_size: int) -> None:
    """Other names, another order of dimensions, scales of each part of what is multiplied as one, plain ones between,
    slices of each rank: logits are those of the dense checkpoint with the same numbers, to the bit."""
    codes, dense = pair
    model, reference = PagedModel(codes, tp_size=tp_size), PagedModel(dense, tp_size=tp_size)
    batch = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
    assert torch.equal(model.forward(batch), reference.forward(batch))
    for rank, report in enumerate(model.reports):
        size = shard_bytes(read_model_config(codes), rank, tp_size, torch.float32)
        assert report.shard_bytes == size < 0.85 * reference.reports[rank].shard_bytes
        assert report.bytes_read == size  # what is plain is float32 here and in the file


def test_what_is_plain_is_dense_and_the_yaml_file_has_no_say(pair: tuple[Path, Path]) -> None:
    config = read_model_config(pair[0])
    held = {config.quantization_of(weight, DENSE) for layer in config.layers for weight in layer.weights()}
    assert {type(one).__name__ for one in held} == {"Codes", "Dense"}
    assert choose_default(config, "none", for_target=False) is DENSE
    with pytest.raises(ConfigError, match=r"quantization int8 is for plain weights, and those .* \(codes\): leave it"):
        choose_default(config, "int8", for_target=False)
    assert choose_default(read_model_config(pair[1]), "int8", for_target=False) is not DENSE


def test_a_target_with_stored_codes_is_exact(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft, prompts = noisy_copy(tmp_path / "draft", pair[1], 0.02), [prompt_of(length) for length in (3, 20)]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    with make_llm(pair[1]) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    with make_llm(pair[0], draft) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 5


def test_tensors_that_a_quantization_calls_for_are_checked_before_the_first_is_read(pair: tuple[Path, Path]) -> None:
    name, path = "model.layers.1.mlp.up_proj.scale", pair[0]
    weights = load_file(path / "model.safetensors")
    scale = weights.pop(name)
    for value, message in (
        (None, f"has no tensor '{name}'"),
        (scale[:-1].clone(), r"has shape \[111\]"),
        (torch.full_like(scale, torch.nan), f"tensor '{name}' holds NaN"),
    ):
        save_weights(path, weights if value is None else {**weights, name: value})
        with pytest.raises(CheckpointError, match=message):
            PagedModel(path)
    # The head is the first that is read.
    save_weights(path, {**weights, "lm_head.weight": torch.full_like(weights["lm_head.weight"], torch.nan)})
    with pytest.raises(CheckpointError, match=f"has no tensor '{name}'"):
        PagedModel(path)
    with pytest.raises(CheckpointError, match=f"has no tensor '{name}'"):
        check_model_weights(path, read_model_config(path), 1)


def test_what_cannot_be_held_as_it_is_stored_is_refused(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pair[0]
    with pytest.raises(ConfigError, match="codes are not multiplied in float16"):
        shard_bytes(read_model_config(path), 0, 1, torch.float16)
    monkeypatch.setattr(Codes, "fits_targets", False)
    with pytest.raises(ConfigError, match="weights that are stored so are for drafts alone"):
        make_llm(path)
    config = ignoring(path, "lm_head", "model.layers.1.mlp.up_proj")
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate_proj\.weight, model\.layers\.1\.mlp\.up_proj\.weight are multipl"
    ):
        shard_bytes(config, 0, 1, torch.float32)
