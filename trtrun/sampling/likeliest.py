"""The few largest of many numbers, row by row: torch's own search on the CPU, a kernel that reads them once on CUDA.

It knows numbers alone.
"""

from __future__ import annotations

import torch

from trtrun.kernels.chooser import operations_of
from trtrun.sampling.filters import largest, most_ranked
from trtrun.sampling.pieces import pieces


def argmax(numbers: torch.Tensor) -> torch.Tensor:
    """Where the largest number of each row stands, the first one where several are.

    Args:
        numbers: [..., width] float32, any device. A number that is not finite, but for -inf, is the largest.

    Returns:
        [...] int64; 0 where all are -inf.
    """
    return operations_of(numbers.device.type).argmax(numbers)


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
    return operations_of(numbers.device.type).likeliest(numbers, min(count, numbers.shape[1]))


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
    lines = numbers.reshape(-1, width)
    at_once = operations_of(numbers.device.type).likeliest_in_order(lines, count)
    if at_once is not None:
        return at_once.reshape(*numbers.shape[:-1], count)
    found = torch.empty((len(lines), count), dtype=torch.int64, device=numbers.device)
    for part in pieces(len(lines), width, most_ranked(numbers.device.type)):
        found[part] = largest(lines[part], count)[1]
    return found.view(*numbers.shape[:-1], count)
