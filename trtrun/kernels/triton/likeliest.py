"""The few largest numbers of each row, in Triton for CUDA: a vocabulary of logits is read once.

It knows tensors. It does not know what the numbers mean, or when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early

_PIECE = 2048
"""Numbers of which one program finds the largest."""


@triton.jit
def _keep_largest(value, position, kept, kept_positions, COUNT: tl.constexpr, WIDTH):
    """Store the COUNT largest of `value` and the numbers of `position` beside them, the largest first."""
    for rank in range(COUNT):
        best, lane = tl.max(value, axis=0, return_indices=True)
        taken = tl.arange(0, value.shape[0]) == lane
        place = tl.sum(tl.where(taken, position, 0), axis=0)
        tl.store(kept + rank, best)
        # Where only -inf is left, lanes beyond the row are as good as any.
        tl.store(kept_positions + rank, tl.minimum(place, WIDTH - 1))
        value = tl.where(taken, float("-inf"), value)


@triton.jit
def _largest_of_pieces_kernel(
    numbers, stride, width, values, positions, COUNT: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(numbers + row * stride + position, mask=position < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # else NaN would be passed over
    at = (row * tl.num_programs(1) + piece) * COUNT
    _keep_largest(value, position, values + at, positions + at, COUNT, width)


@triton.jit
def _largest_of_rows_kernel(
    values, positions, candidates, width, best, found, COUNT: tl.constexpr, PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    value = tl.load(values + row * candidates + lane, mask=lane < candidates, other=float("-inf"))
    position = tl.load(positions + row * candidates + lane, mask=lane < candidates, other=0)
    _keep_largest(value, position, best + row * COUNT, found + row * COUNT, COUNT, width)


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] on CUDA, each row contiguous. NaN counts as infinite.
        count: how many, at most `width`.

    Returns:
        [rows, count] int64. Among equal numbers the first come first; where fewer are above -inf, what follows them
        may come twice.
    """
    rows, width = numbers.shape
    found = torch.empty((rows, count), dtype=torch.int64, device=numbers.device)
    if not rows:
        return found
    pieces = triton.cdiv(width, _PIECE)
    values = torch.empty((rows, pieces * count), dtype=torch.float32, device=numbers.device)
    positions = torch.empty((rows, pieces * count), dtype=torch.int64, device=numbers.device)
    _largest_of_pieces_kernel[(rows, pieces)](
        numbers, numbers.stride(0), width, values, positions, COUNT=count, PIECE=_PIECE, num_warps=4, **early(numbers)
    )
    best = torch.empty((rows, count), dtype=torch.float32, device=numbers.device)
    _largest_of_rows_kernel[(rows,)](
        values, positions, pieces * count, width, best, found,
        COUNT=count, PADDED=triton.next_power_of_2(pieces * count), num_warps=4,
        **early(numbers),
    )  # fmt: skip
    return found
