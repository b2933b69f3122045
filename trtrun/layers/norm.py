"""RMSNorm (arXiv:1910.07467): statistics in float32, rounded to the dtype, then times the weight, as transformers does.

It knows one weight. It does not know where in a layer it stands.
"""

from __future__ import annotations

import torch

from trtrun.kernels.chooser import operations_of
from trtrun.kernels.rounded_rows import RoundedRows


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        weight: [size], or [heads, size] for one weight per head; in the model's dtype on its device.
        eps: added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps
        self._operations = operations_of(weight.device.type)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size], or [tokens, heads, size] for one weight per head → the same shape and dtype."""
        return self._operations.normalise(x, self.weight, self._eps)

    def rounded(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> RoundedRows:
        """As `add`, or the norm of `hidden` where `delta` is None, rounded for a layer that takes rounded rows; on CUDA
        with Triton."""
        return self._operations.normalise_rounded(hidden, self.weight, self._eps, delta)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """hidden += delta, in place, and the norm of the sum; both [tokens, size] in the model's dtype."""
        return self._operations.normalise(hidden, self.weight, self._eps, delta)
