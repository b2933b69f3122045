"""y = x @ (codes * scale).T + bias on the CPU, with weights in E4M3 and activations in bfloat16, or rounded to E4M3.

It knows one product; how it works is told in byte_matmul.py. It does not know how codes and scales came about. Every
number of E4M3 is a bfloat16, products of two are exact in float32, and activations that are rounded are handed on as
bfloat16 with the row's scale behind them.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from trtrun.kernels.cpu.byte_matmul import BlockedByteMatmul
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.fp8_matmul_code import (
    ROUND_ROWS,
    ROW_SCALE_BYTES,
    RoundingArguments,
    fp8_matmul_module,
    rounding_module,
)
from trtrun.kernels.cpu.machine import Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul_code import KERNEL, prefetch_for
from trtrun.kernels.torch.fp8 import round_activations

_ALONE = 16 * 1024
"""Numbers up to which one thread rounds faster than several wake (as in fused.py)."""


class BlockedFp8Matmul(BlockedByteMatmul):
    """The product with one weight of 8 bits, which it keeps in blocks.

    Args:
        codes: [out, in] E4M3 on the CPU, none of them NaN; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
        rounds_activations: whether each row of x is rounded to E4M3, too.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> None:
        super().__init__(codes, scale, bias, _kernel(rounds_activations))
        self._rounds_activations = rounds_activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] bfloat16 → [rows, out] bfloat16."""
        return super().__call__(_with_scales(x) if self._rounds_activations else x)


def _with_scales(x: torch.Tensor) -> torch.Tensor:
    """x [rows, in], `in` even → [rows, in + 2] bfloat16: each row rounded to E4M3, then its scale as a float32."""
    rows, inputs = x.shape
    result = torch.empty((rows, inputs + ROW_SCALE_BYTES // 2), dtype=torch.bfloat16)
    if inputs % LANES:
        values, scale = round_activations(x)
        result[:, :inputs] = values
        result.view(torch.float32)[:, inputs // 2] = scale
        return result
    if x.stride(1) != 1:
        x = x.contiguous()
    arguments = RoundingArguments(
        x=x.data_ptr(),
        output=result.data_ptr(),
        x_stride=x.stride(0) * x.itemsize,
        output_stride=result.stride(0) * result.itemsize,
        rows=rows,
        size=inputs,
    )
    _rounding()(ctypes.addressof(arguments), 1 if x.numel() <= _ALONE else torch.get_num_threads())
    return result


@functools.cache
def _kernel(scales_rows: bool) -> Kernel:
    prefetch = prefetch_for(processor_name())
    return load_kernels(fp8_matmul_module, prefetch, scales_rows=scales_rows, names=(KERNEL,))[KERNEL]


@functools.cache
def _rounding() -> Kernel:
    return load_kernels(rounding_module, names=(ROUND_ROWS,))[ROUND_ROWS]
