"""Rotary angles of a forward's tokens, read by one Triton kernel in place of three of torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _select_kernel(
    cosines, sines, positions, cosine, sine, width, SIZE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + token), 0)
    number = tl.arange(0, SIZE)
    inside = number < width
    source, target = position * width + number, token * width + number
    tl.store(cosine + target, tl.load(cosines + source, mask=inside), mask=inside)
    tl.store(sine + target, tl.load(sines + source, mask=inside), mask=inside)


def select_angles(
    cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select angles as torch's operations do; tables are contiguous."""
    count, width = len(positions), cosines.shape[1]
    cosine, sine = cosines.new_empty((count, width)), sines.new_empty((count, width))
    if count:
        _select_kernel[(count,)](
            cosines, sines, positions.contiguous(), cosine, sine, width,
            SIZE=triton.next_power_of_2(width), num_warps=1, **early(cosines),
        )  # fmt: skip
    return cosine, sine
