"""Weights of 8 bits with an exponent (E4M3) and a scale for each block of 128 by 128, as DeepSeek and Qwen publish
theirs, for targets and drafts: a byte a weight to read.

Activations are rounded, too, 128 numbers of a token at a time by the largest of them, as those checkpoints are made
for, so that the matrix units multiply codes by codes. Checkpoints that are quantized so are held so on GPUs
(trtrun.linear.stored); others are rounded as they are read, by the largest weight of each block. The vocabulary head
stays dense then, as with `fp8`.

A rank of a tensor-parallel group has blocks of its own slices: cuts at multiples of 128 are the whole matrix's blocks.

Products, by device:

- CUDA with Triton, on GPUs that multiply E4M3 (8.9, and from 9.0 on): trtrun.kernels.triton.matmul.fp8_block_matmul.
- anything else: torch's operations (trtrun.kernels.torch.fp8), right anywhere.

It knows one weight and its products. It does not know how these work, nor files.
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
from trtrun.linear.quantization.fp8 import has_fp8_products

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Output features of a block, and inputs."""

_ROUNDED_TOGETHER = 16
"""Rows whose scales lie beside each other in memory, and bytes that codes of a row are aligned to."""


class Fp8Block:
    """Two tensors, "codes" [out, in] E4M3 and "block_scale" [ceil(out / 128), ceil(in / 128)] float32; see
    `Quantization`."""

    takes_head = False
    fits_targets = True

    def check(self, dtype: str, device_type: str) -> None:
        """bfloat16 on CPUs; on GPUs float16, too."""
        check_half_precision("fp8_block", dtype, device_type)

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """See `Quantization`."""
        return weight.parts

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """See `Quantization`."""
        import torch

        features, inputs = weight.shape
        return {
            "codes": TensorSpec((features, inputs), torch.float8_e4m3fn),
            "block_scale": TensorSpec((-(-features // BLOCK), -(-inputs // BLOCK)), torch.float32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: rounded activations on GPUs that multiply codes; elsewhere what torch's operations
        take."""
        from trtrun.kernels.torch.fp8 import TorchFp8BlockMatmul

        features, inputs = weight.shape
        if has_fp8_products(device_type):
            scales = -(-inputs // BLOCK) * 4
            return rows * (inputs + scales + _ROUNDED_TOGETHER) + _ROUNDED_TOGETHER * scales
        return TorchFp8BlockMatmul.working_bytes(rows, features, inputs)

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        from trtrun.kernels.torch.fp8 import quantize_blocks

        return quantize_blocks(source.dense())

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`. Rows are bit-equal in any company on all devices."""
        from trtrun.kernels.chooser import operations_of

        codes = tensors["codes"]
        return operations_of(codes.device.type).fp8_block_product(codes, tensors["block_scale"], bias)


QUANTIZATIONS.register("fp8_block")(Fp8Block())
