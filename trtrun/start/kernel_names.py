"""What layers compute with where they have the choice, in one word for reports.

It knows device and dtype. Each layer asks for itself as well: odd shapes are torch's anywhere.
"""

from __future__ import annotations

import torch

from trtrun.kernels.cpu.machine import has_bfloat16_kernels
from trtrun.kernels.triton.support import triton_works


def kernels_for(device: torch.device, dtype: torch.dtype) -> str:
    """Name the kernels: "triton" on GPUs where it works, "avx512_bf16" for trtrun's own on the CPU, else "torch"."""
    if triton_works(device.type):
        return "triton"
    is_own = device.type == "cpu" and dtype is torch.bfloat16 and has_bfloat16_kernels()
    return "avx512_bf16" if is_own else "torch"
