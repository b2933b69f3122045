"""No quantization: weights in the dtype of activations.

Products, by device and dtype:

- CPU, bfloat16 and float32, on processors with AVX2 or AVX-512: trtrun's own kernel (trtrun.kernels.cpu.matmul).
- CPU, bfloat16 and float32 elsewhere: oneDNN with the weight packed once (trtrun.kernels.cpu.onednn_matmul).
- CPU, float16, and builds of torch without oneDNN: `F.linear`.
- CUDA, bfloat16 and float16, with Triton: a kernel and cuBLASLt that give a row the same bits in any company
  (trtrun.kernels.triton.matmul.dense).
- anything else: `F.linear` (cuBLAS on CUDA).

It knows one weight and its products. It does not know how these work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import (
    QUANTIZATIONS,
    LinearWeight,
    Product,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
)

if TYPE_CHECKING:
    import torch


class Dense:
    """One tensor, "weight" [out, in]; see `Quantization`."""

    takes_head = True
    fits_targets = True

    def check(self, dtype: str, device_type: str) -> None:
        """Any dtype on any device."""

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Wherever the weight is not packed; that depends on device and dtype alone."""
        from trtrun.kernels.chooser import operations_of

        return device.type != "cpu" or not operations_of(device.type).packs_weights(dtype)

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """See `Quantization`."""
        return weight.parts

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """See `Quantization`."""
        return {"weight": TensorSpec(weight.shape, dtype)}

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: on CPUs that do not multiply bfloat16 activations become float32 first."""
        if len(weight.shape) != 2 or device_type != "cpu" or dtype.itemsize != 2:
            return 0
        return rows * weight.shape[1] * 4

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        return {"weight": source.dense()}

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`."""
        from trtrun.kernels.chooser import operations_of

        weight = tensors["weight"]
        return operations_of(weight.device.type).product(weight, bias, batch_invariant=batch_invariant)


QUANTIZATIONS.register("none")(Dense())
