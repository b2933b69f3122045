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
from torch.nn import functional

from trtrun.layers.native.int8_matmul import BlockedInt8Matmul
from trtrun.layers.native.machine import has_bfloat16_kernels
from trtrun.layers.triton_support import triton_works
from trtrun.quantization import QuantizedWeight

_FEW_ROWS = 4
"""Rows up to which torch's product of int8 is faster than a product of widened weights (measured on Zen 5)."""
_TORCH_STEP = 32
"""Input features that torch's product takes at a time: others it reads past the end of, without a word."""


class TorchInt8Matmul:
    """The product in plain torch operations: any number of rows, dtype of activations and device."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = weight.codes, weight.scale, bias
        # The factors of torch's operation would have to be of x's dtype, which rounds them.
        has_product = weight.codes.device.type == "cpu" and weight.codes.shape[1] % _TORCH_STEP == 0
        self._ones = torch.ones(weight.codes.shape[0], dtype=torch.bfloat16) if has_product else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        if self._ones is not None and 0 < x.shape[0] <= _FEW_ROWS:
            sums = torch._weight_int8pack_mm(x.contiguous(), self._codes, self._ones)
        else:
            sums = functional.linear(x, self._codes.to(x.dtype))
        scaled = sums * self._scale
        return (scaled if self._bias is None else scaled.add_(self._bias)).to(x.dtype)


def int8_product(weight: QuantizedWeight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with `weight` [out, in] and `bias` [out] or None: x [rows, in] → [rows, out] in x's dtype."""
    codes = weight.codes
    if triton_works(codes.device.type):
        from trtrun.layers.int8_kernels import TritonInt8Matmul

        return TritonInt8Matmul(weight, bias)
    if codes.device.type == "cpu" and codes.shape[1] % 2 == 0 and has_bfloat16_kernels():
        return BlockedInt8Matmul(codes, weight.scale, bias)
    return TorchInt8Matmul(weight, bias)
