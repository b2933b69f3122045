"""Sums of the ranks' tensors in the order of the ranks, with torch's operations, on any device.

Half types are added up in float32 and rounded once. So the sum of an element depends on nothing but the ranks' values:
not on the tensor's shape, nor on what else is summed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALF = (torch.float16, torch.bfloat16)


def needs_total(dtype: torch.dtype, size: int) -> bool:
    """Whether `size` tensors of this dtype are added up in float32 beside them: more than two of a half type."""
    return size > 2 and dtype in HALF


def add_up(parts: Sequence[torch.Tensor], total: torch.Tensor | None, result: torch.Tensor) -> None:
    """Write the sum of `parts`, in their order, to `result`; through `total` (float32) where `needs_total`."""
    if total is None:
        # Two half tensors need no `total`: torch adds them in float32 and rounds once.
        torch.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            result.add_(part)
    else:
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        result.copy_(total)


def slice_bounds(count: int, size: int) -> list[int]:
    """Where the slices of `count` elements begin that `size` ranks sum, and where the last ends: size + 1 numbers."""
    return [count * rank // size for rank in range(size + 1)]
