"""Weights of 8 bits, activations as they are (W8A16): half the bytes of a bfloat16 weight to read at every token.

Each output feature is scaled so that its largest weight becomes 127 and rounded to nearest: absmax quantization by
vectors (Dettmers et al. 2022, arXiv:2208.07339, section 2.1) without their treatment of activations, which stay as
they are. It needs no calibration data: dense checkpoints are rounded as they are read. A draft loses a little
acceptance by it, the output of a run nothing.

Products, x @ (codes * scale).T + bias, by device:

- CUDA with Triton: trtrun.kernels.triton.int8_matmul.
- CPU with AVX-512 BF16: trtrun.kernels.cpu.int8_matmul.
- anything else: torch's operations (trtrun.kernels.torch_int8), right anywhere.

It knows one weight and its products. It does not know how these work.
"""

from __future__ import annotations

import torch

from trtrun.kernels.cpu.int8_matmul import BlockedInt8Matmul
from trtrun.kernels.cpu.machine import has_bfloat16_kernels
from trtrun.kernels.torch_int8 import TorchInt8Matmul
from trtrun.kernels.triton.support import triton_works
from trtrun.linear.quantization.base import (
    QUANTIZATIONS,
    LinearTensors,
    LinearWeight,
    Product,
    Tensors,
    TensorSpec,
    WeightSource,
    check_half_precision,
)

_LARGEST = 127
_NUMBERS_AT_A_TIME = 1 << 20
"""Numbers whose float32 copies exist at once: 4 MiB each."""


class Int8:
    """Two tensors, "codes" [out, in] int8 and "scale" [out] float32: a weight is codes * scale; see `Quantization`."""

    takes_head = True
    fits_targets = False  # torch's products, and those of many rows on GPUs, promise nothing

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """bfloat16 on CPUs; on GPUs float16, too. Others would run slower than unquantized."""
        check_half_precision("int8", dtype, device)

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    def create(self, weight: LinearWeight, dtype: torch.dtype) -> LinearTensors:
        """See `Quantization`."""
        held = {
            "codes": TensorSpec(weight.shape, torch.int8),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }
        return LinearTensors(held, weight.parts)

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: the whole weight widened, and sums in float32."""
        features, inputs = weight.shape
        return features * inputs * dtype.itemsize + rows * features * 4

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        return quantize(source.dense())

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`. Rows are bit-equal in any company on the CPU's kernel; torch's operations promise
        nothing, as only drafts are rounded."""
        codes, scale = tensors["codes"], tensors["scale"]
        if triton_works(codes.device.type):
            from trtrun.kernels.triton.int8_matmul import TritonInt8Matmul

            return TritonInt8Matmul(codes, scale, bias)
        if codes.device.type == "cpu" and codes.shape[1] % 2 == 0 and has_bfloat16_kernels():
            return BlockedInt8Matmul(codes, scale, bias)
        return TorchInt8Matmul(codes, scale, bias)


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [out, in] of any float dtype → codes [out, in] int8 and scale [out] float32 on its device."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, _NUMBERS_AT_A_TIME // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        largest = part.abs().amax(dim=1)
        factor = torch.where(largest > 0, largest / _LARGEST, 1.0)
        codes[start : start + rows] = part.div_(factor.unsqueeze(1)).round_()
        scale[start : start + rows] = factor
    return {"codes": codes, "scale": scale}


QUANTIZATIONS.register("int8")(Int8())
