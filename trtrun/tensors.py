"""Tensors that the host fills and a device computes with, made without waiting for the device.

It knows numbers. It does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_integers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 tensor on `device`, copied without waiting for the device (`torch.tensor(..., device=...)` would wait)."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
