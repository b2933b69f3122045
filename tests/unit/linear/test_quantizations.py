"""What every quantization promises, and that one whose tensors lie in the checkpoint needs no file but its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from native import leave_to_torch
from paged import CPU, PagedModel
from safetensors.torch import load_file

from trtrun.errors import CheckpointError
from trtrun.kernels.torch.int8 import quantize
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import (
    LinearWeight,
    Product,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
    count_bytes,
)
from trtrun.models.config import read_model_config
from trtrun.models.loading import shard_bytes
from trtrun.models.weights import HeldWeight, StoredSlice

DENSE = QUANTIZATIONS.get("none")


@dataclass
class Ready:
    """A dense weight that is there already."""

    matrix: torch.Tensor

    @property
    def weight(self) -> HeldWeight:
        """The whole matrix."""
        shape = (self.matrix.shape[0], self.matrix.shape[1])
        return HeldWeight(shape, (StoredSlice("a.weight", shape, (range(shape[0]), range(shape[1]))),))

    def dense(self) -> torch.Tensor:
        """The matrix."""
        return self.matrix

    def read(self, stored: object) -> torch.Tensor:
        """There is no file."""
        raise AssertionError(stored)


class Stored:
    """Layers whose checkpoint holds codes [in, out] and scales [out], but for the head, which is dense."""

    takes_head = fits_targets = True

    def check(self, dtype: str, device_type: str) -> None:
        """Any."""

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    @staticmethod
    def _files(weight: LinearWeight) -> Sequence[tuple[StoredSlice, StoredSlice]] | None:
        if weight.parts[0].name == "lm_head.weight":
            return None
        found = []
        for part in weight.parts:
            start, (rows, columns), (out, inputs) = part.name.removesuffix("weight"), part.ranges, part.shape
            codes = StoredSlice(f"{start}codes", (inputs, out), (columns, rows))
            found.append((codes, StoredSlice(f"{start}scale", (out,), (rows,))))
        return found

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """Codes and scales, or the dense head."""
        files = self._files(weight)
        return DENSE.stored(weight) if files is None else [part for pair in files for part in pair]

    def create(self, weight: LinearWeight, dtype: torch.dtype) -> Mapping[str, TensorSpec]:
        """Codes and scales, or the dense head."""
        if self._files(weight) is None:
            return DENSE.create(weight, dtype)
        return {
            "codes": TensorSpec((weight.shape[1], weight.shape[0]), torch.float16),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Nothing."""
        return 0

    def load(self, source: WeightSource) -> Tensors:
        """As they lie in the file, joined along `out`."""
        files = self._files(source.weight)
        if files is None:
            return DENSE.load(source)
        codes = [source.read(part) for part, _ in files]
        return {"codes": torch.cat(codes, dim=1), "scale": torch.cat([source.read(part) for _, part in files])}

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """As a dense float32 weight."""
        if "codes" in tensors:
            tensors = {"weight": (tensors["codes"].float() * tensors["scale"]).T.contiguous()}
        return DENSE.apply(tensors, bias, batch_invariant=batch_invariant)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The quantization above, registered as "stored" for one test."""
    made = Stored()
    monkeypatch.setitem(QUANTIZATIONS._items, "stored", made)
    return made


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of codes and scales, and the dense one of the same numbers."""
    options = {"attention_bias": True, "vocab_size": 200}
    codes_path, dense_path = (make_checkpoint(tmp_path / name, **options) for name in ("codes", "dense"))
    held, plain = {}, {}
    for name, weight in load_file(dense_path / "model.safetensors").items():
        if "proj.weight" not in name:
            held[name] = plain[name] = weight
            continue
        made = quantize(weight)
        held[name.replace("weight", "codes")] = made["codes"].T.contiguous().half()
        held[name.replace("weight", "scale")] = made["scale"]
        plain[name] = made["codes"] * made["scale"].unsqueeze(1)
    save_weights(codes_path, held)
    save_weights(dense_path, plain)
    return codes_path, dense_path


@pytest.mark.parametrize("name", QUANTIZATIONS.names())
@pytest.mark.parametrize("shape", [(70, 64), (24, 60), (1, 65)])
def test_what_is_loaded_is_what_was_created(name: str, shape: tuple[int, int]) -> None:
    """Shapes, dtypes, and so the bytes that plans count."""
    quantization, source = QUANTIZATIONS.get(name), Ready(torch.randn(shape).bfloat16())
    created = quantization.create(source.weight, torch.bfloat16)
    loaded = quantization.load(source)
    found = {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in loaded.items()}
    assert found == created
    assert sum(tensor.nbytes for tensor in loaded.values()) == count_bytes(created)
    assert quantization.stored(source.weight) == source.weight.parts


@pytest.mark.parametrize("name", QUANTIZATIONS.names())
@pytest.mark.parametrize("with_bias", [False, True])
def test_layers_multiply_with_what_they_hold(name: str, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization, source = QUANTIZATIONS.get(name), Ready(torch.randn(70, 64).bfloat16())
    bias = torch.randn(70).bfloat16() if with_bias else None
    for leave in (lambda: None, lambda: leave_to_torch(monkeypatch)):
        leave()
        layer = Linear((70, 64), quantization, quantization.load(source), bias)
        assert (layer.out_features, layer.in_features, layer.device) == (70, 64, CPU)
        x = torch.randn(5, 64).bfloat16()
        expected = x.float() @ source.matrix.float().T + (0 if bias is None else bias.float())
        assert layer(x).dtype is torch.bfloat16
        share = 0.06 if name.startswith("fp8") else 0.03  # of eight bits fp8 has three for the mantissa
        assert torch.allclose(layer(x).float(), expected, atol=share * float(expected.abs().max()))


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_checkpoint_of_quantized_tensors_needs_one_class(pair: tuple[Path, Path], tp_size: int) -> None:
    """Other names, another order of dimensions, a head that stays dense, slices of each rank: logits are those of the
    dense checkpoint with the same numbers, to the bit."""
    codes, dense = pair
    model, reference = PagedModel(codes, tp_size=tp_size, quantization="stored"), PagedModel(dense, tp_size=tp_size)
    batch = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
    assert torch.equal(model.forward(batch), reference.forward(batch))
    for rank, report in enumerate(model.reports):
        size = shard_bytes(read_model_config(codes), rank, tp_size, torch.float32, quantization="stored")
        assert report.shard_bytes == size < 0.75 * reference.reports[rank].shard_bytes
        assert report.bytes_read == size  # the head, norms and biases are float32 here and in the file


@pytest.mark.usefixtures("stored")
def test_tensors_that_a_quantization_calls_for_are_checked_before_the_first_is_read(pair: tuple[Path, Path]) -> None:
    name, path = "model.layers.1.mlp.down_proj.scale", pair[0]
    weights = load_file(path / "model.safetensors")
    scale = weights.pop(name)
    for value, message in (
        (None, f"has no tensor '{name}'"),
        (scale[:-1].clone(), r"has shape \[63\]"),
        (torch.full_like(scale, torch.nan), f"tensor '{name}' holds NaN"),
    ):
        save_weights(path, weights if value is None else {**weights, name: value})
        with pytest.raises(CheckpointError, match=message):
            PagedModel(path, quantization="stored")
    # The head is the first that is read.
    save_weights(path, {**weights, "lm_head.weight": torch.full_like(weights["lm_head.weight"], torch.nan)})
    with pytest.raises(CheckpointError, match=f"has no tensor '{name}'"):
        PagedModel(path, quantization="stored")
