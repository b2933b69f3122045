"""RMSNorm (arXiv:1910.07467): statistics in float32, rounded to the dtype, then times the weight, as transformers does.

It knows one weight. It does not know where in a layer it stands.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtrun.kernels.cpu.fused import fuses, normalise
from trtrun.kernels.rounded_rows import RoundedRows
from trtrun.kernels.triton.support import triton_works


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        weight: [size], or [heads, size] for one weight per head; in the model's dtype on its device.
        eps: added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = weight.shape[-1:]
        self._eps = eps
        self._fused = weight.dim() == 1 and triton_works(weight.device.type)
        self._native = fuses(weight.dtype, weight.device, weight.shape[-1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size], or [tokens, heads, size] for one weight per head → the same shape and dtype."""
        if self._native:
            return normalise(x, self.weight, self._eps)
        if self._fused:
            from trtrun.kernels.triton.fused import add_and_normalise

            return add_and_normalise(x.reshape(-1, x.shape[-1]), None, self.weight, self._eps).view(x.shape)
        # F.rms_norm computes in float32 and rounds to x's dtype; the weight comes after the rounding, as in the
        # models' own code, so it is not handed to F.rms_norm.
        return functional.rms_norm(x, self._shape, None, self._eps).mul_(self.weight)

    def rounded(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> RoundedRows:
        """As `add`, or the norm of `hidden` where `delta` is None, rounded for a layer that takes rounded rows; on CUDA
        with Triton."""
        from trtrun.kernels.triton.fused import add_and_normalise_rounded

        return add_and_normalise_rounded(hidden, delta, self.weight, self._eps)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """hidden += delta, in place, and the norm of the sum; both [tokens, size] in the model's dtype."""
        if self._fused:
            from trtrun.kernels.triton.fused import add_and_normalise

            return add_and_normalise(hidden, delta, self.weight, self._eps)
        if self._native:
            return normalise(hidden, self.weight, self._eps, delta)
        hidden += delta
        return self(hidden)
