"""Weights of 8 bits, and the product with them in plain torch operations: right on any device, fast for a row or two on
the CPU.

It knows one weight of codes and scales. It does not know whose it is (trtrun.linear.quantization.int8).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtrun.tensors import numbers_at_a_time

_FEW_ROWS = 4
"""Rows up to which torch's product of int8 is faster than a product of widened weights (measured on Zen 5)."""
_TORCH_STEP = 32
"""Input features that torch's product takes at a time: others it reads past the end of, without a word."""

_LARGEST = 127


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [out, in] of any float dtype → codes [out, in] int8 and scale [out] float32 on its device."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, numbers_at_a_time(weight.device) // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        largest = part.abs().amax(dim=1)
        factor = torch.where(largest > 0, largest / _LARGEST, 1.0)
        codes[start : start + rows] = part.div_(factor.unsqueeze(1)).round_()
        scale[start : start + rows] = factor
    return {"codes": codes, "scale": scale}


class TorchInt8Matmul:
    """x @ (codes * scale).T + bias in plain torch operations: any number of rows, dtype of activations and device.

    Args:
        codes: [out, in] int8.
        scale: [out] float32.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        # The factors of torch's operation would have to be of x's dtype, which rounds them.
        has_product = codes.device.type == "cpu" and codes.shape[1] % _TORCH_STEP == 0
        self._ones = torch.ones(codes.shape[0], dtype=torch.bfloat16) if has_product else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        if self._ones is not None and 0 < x.shape[0] <= _FEW_ROWS:
            sums = torch._weight_int8pack_mm(x.contiguous(), self._codes, self._ones)
        else:
            sums = functional.linear(x, self._codes.to(x.dtype))
        scaled = sums * self._scale
        return (scaled if self._bias is None else scaled.add_(self._bias)).to(x.dtype)
