"""No quantization: weights in the dtype of activations."""

from __future__ import annotations

import math

import torch

from trtrun.quantization.base import QUANTIZATIONS


class Dense:
    """Weights as they are; see `Quantization`."""

    keeps_weight = True

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Any dtype on any device."""

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """See `Quantization`."""
        return math.prod(shape) * dtype.itemsize

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Quantization`."""
        return weight


QUANTIZATIONS.register("none")(Dense())
