"""What a quantization is: a way to hold the weights of linear layers in fewer bytes. Known ones register by name.

It knows shapes, dtypes and devices. It does not know models, files, or the products that use the weights (layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from trtrun.registry import Registry


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as integers and one factor for each output feature: codes * scale.

    Attributes:
        codes: [out, in] int8.
        scale: [out] float32, on the device of `codes`.
    """

    codes: torch.Tensor
    scale: torch.Tensor


class Quantization(Protocol):
    """One way to hold weights.

    Attributes:
        keeps_weight: whether `quantize` returns the weight as it is.
    """

    keeps_weight: bool

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ConfigError where activations of `dtype` on `device` cannot be multiplied with such weights."""
        ...

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of a weight of `shape` [out, in] that would be of `dtype`."""
        ...

    def quantize(self, weight: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """weight [out, in] in the dtype of activations, on its device → what is held in its place."""
        ...


QUANTIZATIONS: Registry[Quantization] = Registry("quantization")
