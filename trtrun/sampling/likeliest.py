"""The few largest of many numbers, row by row: torch's own search on the CPU, a kernel that reads them once on CUDA.

It knows numbers alone.
"""

from __future__ import annotations

import torch

from trtrun.kernels.triton.support import triton_works


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] float32, any device; without NaN.
        count: how many; all of a row that is shorter.

    Returns:
        [rows, count] int64. Among equal numbers any one may come first; where fewer are above -inf, what follows them
        may come twice.
    """
    count = min(count, numbers.shape[1])
    if triton_works(numbers.device.type):
        from trtrun.kernels.triton import likeliest as kernels

        return kernels.likeliest(numbers, count)
    return numbers.topk(count, dim=-1).indices
