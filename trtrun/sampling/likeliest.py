"""The few largest of many numbers, row by row: torch's own search on the CPU, a kernel that reads them once on CUDA.

It knows numbers alone.
"""

from __future__ import annotations

import torch

from trtrun.kernels.triton.support import triton_works
from trtrun.sampling.filters import largest, most_ranked
from trtrun.sampling.pieces import pieces


def argmax(numbers: torch.Tensor) -> torch.Tensor:
    """Where the largest number of each row stands, the first one where several are.

    Args:
        numbers: [..., width] float32, any device. A number that is not finite, but for -inf, is the largest.

    Returns:
        [...] int64; 0 where all are -inf.
    """
    if triton_works(numbers.device.type):
        from trtrun.kernels.triton import likeliest as kernels

        return kernels.likeliest(numbers.reshape(-1, numbers.shape[-1]), 1).view(numbers.shape[:-1])
    return numbers.argmax(dim=-1)


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] float32, any device; without NaN.
        count: how many; all of a row that is shorter.

    Returns:
        [rows, count] int64. Of the largest the first one comes first, as `torch.argmax` has it: in bfloat16 the largest
        logit is often there twice. Elsewhere equal numbers have no order, and where fewer are above -inf, what
        follows them may come twice.
    """
    count = min(count, numbers.shape[1])
    if triton_works(numbers.device.type):
        from trtrun.kernels.triton import likeliest as kernels

        return kernels.likeliest(numbers, count)
    found = numbers.topk(count, dim=-1).indices
    first = numbers.argmax(dim=-1, keepdim=True)
    found = torch.where(found == first, found[:, :1], found)
    found[:, :1] = first
    return found


def likeliest_in_order(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first, and of equal ones the first ones first:
    those of a smaller count are the first of a larger one.

    Args:
        numbers: [..., width] float32, any device.
        count: how many, at least 1; all of a row that is shorter.

    Returns:
        [..., count] int64. Where fewer are above -inf, what follows them is any place.
    """
    width = numbers.shape[-1]
    count = min(count, width)
    if triton_works(numbers.device.type):
        from trtrun.kernels.triton import likeliest as kernels

        # Compiled anew for each count: for few of them, which are powers of two.
        ranked = min(width, 1 << (count - 1).bit_length())
        found = kernels.likeliest(numbers.reshape(-1, width), ranked)[:, :count]
        return found.reshape(*numbers.shape[:-1], count)
    lines = numbers.reshape(-1, width)
    found = torch.empty((len(lines), count), dtype=torch.int64, device=numbers.device)
    for part in pieces(len(lines), width, most_ranked(numbers.device.type)):
        found[part] = largest(lines[part], count)[1]
    return found.view(*numbers.shape[:-1], count)
