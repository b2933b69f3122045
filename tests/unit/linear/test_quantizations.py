"""What every quantization promises. Those whose tensors lie in the checkpoint: test_stored_quantizations.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from native import leave_to_torch
from paged import CPU

from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import TensorSlice, TensorSpec, count_bytes
from trtrun.weights.weight import HeldWeight

DENSE = QUANTIZATIONS.get("none")


@dataclass
class Ready:
    """A dense weight that is there already."""

    matrix: torch.Tensor

    @property
    def weight(self) -> HeldWeight:
        """The whole matrix."""
        shape = (self.matrix.shape[0], self.matrix.shape[1])
        return HeldWeight(shape, (TensorSlice("a.weight", shape, (range(shape[0]), range(shape[1]))),))

    def dense(self) -> torch.Tensor:
        """The matrix."""
        return self.matrix

    def read(self, stored: object) -> torch.Tensor:
        """There is no file."""
        raise AssertionError(stored)


@pytest.mark.parametrize("name", QUANTIZATIONS.names())
@pytest.mark.parametrize("shape", [(70, 64), (24, 60), (1, 65)])
def test_what_is_loaded_is_what_was_created(name: str, shape: tuple[int, int]) -> None:
    """Shapes, dtypes, and so the bytes that plans count."""
    quantization, source = QUANTIZATIONS.get(name), Ready(torch.randn(shape).bfloat16())
    created = quantization.create(source.weight, torch.bfloat16, "cpu")
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


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_memory_is_set_aside_for_what_multiplies_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations where matrix units do not take E4M3, which widen numbers to float64."""
    quantization, weight = QUANTIZATIONS.get(name), Ready(torch.zeros(64, 300)).weight
    with_kernels = quantization.working_bytes(weight, 1000, torch.bfloat16, "cuda")
    assert 1000 * 300 < with_kernels < 1000 * 400
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("trtrun.kernels.triton.support.multiplies_fp8", lambda device: False)
    by_torch = quantization.working_bytes(weight, 1000, torch.bfloat16, "cuda")
    assert by_torch == quantization.working_bytes(weight, 1000, torch.bfloat16, "cpu") > 1000 * 300 * 16
