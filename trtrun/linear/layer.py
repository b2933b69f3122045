"""A linear layer on this rank's slice of its weight, held as its quantization says.

It knows shapes and a product. It does not know what the weight is held in (trtrun.linear.quantization), nor tensor
parallelism: the model adds up or gathers partial results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trtrun.kernels.rounded_rows import Activations, Rounding
from trtrun.linear.quantization.base import Quantization, Tensors


class Linear:
    """y = x @ weight.T + bias, for x [tokens, in] to y [tokens, out], in x's dtype on its device.

    Attributes:
        out_features, in_features: of this rank's slice.
        device: where the weight is.
        takes_rounded_rows: how RoundedRows are rounded that x may be, and is best given as by whoever makes it; None
            where it must be as it is.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        quantization: Quantization,
        tensors: Tensors,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = True,
    ) -> None:
        """A layer whose weight of `shape` [out, in] is held in `tensors`.

        Args:
            shape: [out, in].
            quantization: how the weight is held.
            tensors: what `quantization.load` made. The caller must not keep them, so that packed copies replace them.
            bias: [out] in x's dtype, or None.
            batch_invariant: see `Quantization.apply`.
        """
        self.out_features, self.in_features = shape
        self.device = next(iter(tensors.values())).device
        self._product: Callable[[Any], torch.Tensor] = quantization.apply(
            tensors, bias, batch_invariant=batch_invariant
        )
        self.takes_rounded_rows: Rounding | None = getattr(self._product, "takes_rounded_rows", None)

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        return self._product(x)
