"""y = x @ (codes * scale).T + bias on the CPU, with integers of 8 bits for weights and activations in bfloat16.

It knows one product; how it works is told in byte_matmul.py. It does not know how codes and scales came about. An
integer of 8 bits is a bfloat16 without loss.
"""

from __future__ import annotations

import functools

import torch

from trtrun.kernels.cpu.byte_matmul import BlockedByteMatmul
from trtrun.kernels.cpu.int8_matmul_code import int8_matmul_module
from trtrun.kernels.cpu.machine import Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul_code import KERNEL, prefetch_for


class BlockedInt8Matmul(BlockedByteMatmul):
    """The product with one weight of 8 bits, which it keeps in blocks.

    Args:
        codes: [out, in] int8 on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(codes, scale, bias, _kernel())


@functools.cache
def _kernel() -> Kernel:
    return load_kernels(int8_matmul_module, prefetch_for(processor_name()), names=(KERNEL,))[KERNEL]
