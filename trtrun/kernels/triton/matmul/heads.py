"""The products of heads, each with a matrix of its own, on CUDA; and one product whose result is float32.

Each number of a result is one chain of sums over the inputs, as in dense.py, so that rows have the same bits in any
company. It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.support import shared_bytes

_FEWEST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile."""

_MOST_STAGES, _FEW_OUTPUTS = 6, 256


@triton.jit(do_not_specialize=["rows"])
def _heads_kernel(
    x, weight, y, rows, outputs, inputs, x_row, x_head, y_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head = tl.program_id(2)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = output < outputs, row < rows
    start = (head * outputs + tl.where(is_output, output, 0)).to(tl.int64) * inputs
    of_rows = row.to(tl.int64) * x_row + head * x_head
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        number = first + tl.arange(0, INPUTS)
        known = number < inputs
        weights = tl.load(weight + start[:, None] + number[None, :], mask=known[None, :], other=0.0)
        values = tl.load(x + of_rows[None, :] + number[:, None], mask=is_row[None, :] & known[:, None], other=0.0)
        total = tl.dot(weights, values, total, input_precision="ieee")
    place = y + row[None, :].to(tl.int64) * y_row + head * outputs + output[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def multiply_heads(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of each head of x [rows, heads, in], whose numbers lie one behind the other, with its matrix of
    weight [heads, out, in], contiguous: [rows, heads, out] of `dtype`."""
    rows = x.shape[0]
    heads, outputs, inputs = weight.shape
    y = torch.empty((rows, heads, outputs), dtype=dtype, device=x.device)
    if rows:
        height = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(rows)))
        of_tile, at_once, num_warps = 64, 128, 4
        if outputs <= _FEW_OUTPUTS:  # in small tiles, so that there are programs enough to read them
            of_tile, at_once, num_warps = (16, 512, 2) if height == _FEWEST_ROWS else (16, 256, 4)
        stages = shared_bytes(x.device) // (weight.itemsize * at_once * (of_tile + height))
        _heads_kernel[(triton.cdiv(outputs, of_tile), triton.cdiv(rows, height), heads)](
            x, weight, y, rows, outputs, inputs, x.stride(0), x.stride(1), y.stride(0),
            ROWS=height, OUTPUTS=of_tile, INPUTS=at_once, num_warps=num_warps,
            num_stages=max(1, min(_MOST_STAGES, stages)), **early(x),
        )  # fmt: skip
    return y
