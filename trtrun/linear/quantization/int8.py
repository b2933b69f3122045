"""Weights of 8 bits, activations as they are (W8A16): half the bytes of a bfloat16 weight to read at every token.

Each output feature is scaled so that its largest weight becomes 127 and rounded to nearest: absmax quantization by
vectors (Dettmers et al. 2022, arXiv:2208.07339, section 2.1) without their treatment of activations, which stay as
they are. It needs no calibration data: dense checkpoints are rounded as they are read. A draft loses a little
acceptance by it, the output of a run nothing.

Products, x @ (codes * scale).T + bias, by device:

- CUDA with Triton: trtrun.kernels.triton.matmul.int_matmul.
- CPU with AVX-512 BF16: trtrun.kernels.cpu.matmul.
- anything else: torch's operations (trtrun.kernels.torch.integers), right anywhere.

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
    check_half_precision,
)

if TYPE_CHECKING:
    import torch


class Int8:
    """Two tensors, "codes" [out, in] int8 and "scale" [out] float32: a weight is codes * scale; see `Quantization`."""

    takes_head = True
    fits_targets = False  # torch's products, and those of many rows on GPUs, promise nothing

    def check(self, dtype: str, device_type: str) -> None:
        """bfloat16 on CPUs; on GPUs float16, too. Others would run slower than unquantized."""
        check_half_precision("int8", dtype, device_type)

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """See `Quantization`."""
        return weight.parts

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """See `Quantization`."""
        import torch

        return {
            "codes": TensorSpec(weight.shape, torch.int8),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: the whole weight widened, and sums in float32."""
        features, inputs = weight.shape
        return features * inputs * dtype.itemsize + rows * features * 4

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        from trtrun.kernels.torch.integers import quantize_int8

        return quantize_int8(source.dense())

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`. Rows are bit-equal in any company on the CPU's kernel; torch's operations promise
        nothing, as only drafts are rounded."""
        from trtrun.kernels.chooser import operations_of

        codes = tensors["codes"]
        return operations_of(codes.device.type).int8_product(codes, tensors["scale"], bias)


QUANTIZATIONS.register("int8")(Int8())
