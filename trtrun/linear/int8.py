"""x @ (codes * scale).T + bias on any device, by the fastest product there.

It knows one quantized weight. It does not know how it was quantized (trtrun.quantization).

Products, by device:

- CUDA with Triton: int8_kernels.py.
- CPU with AVX-512 BF16: native/int8_matmul.py.
- anything else: torch's own product of int8 for few rows on the CPU, else that of codes in the dtype of activations,
  converted at every call: right anywhere, and fast for a row or two on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.kernels.cpu.int8_matmul import BlockedInt8Matmul
from trtrun.kernels.cpu.machine import has_bfloat16_kernels
from trtrun.kernels.torch_int8 import TorchInt8Matmul
from trtrun.kernels.triton.support import triton_works
from trtrun.quantization import QuantizedWeight


def int8_product(weight: QuantizedWeight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with `weight` [out, in] and `bias` [out] or None: x [rows, in] → [rows, out] in x's dtype."""
    codes = weight.codes
    if triton_works(codes.device.type):
        from trtrun.kernels.triton.int8_matmul import TritonInt8Matmul

        return TritonInt8Matmul(weight, bias)
    if codes.device.type == "cpu" and codes.shape[1] % 2 == 0 and has_bfloat16_kernels():
        return BlockedInt8Matmul(codes, weight.scale, bias)
    return TorchInt8Matmul(weight, bias)
