"""Chooses the implementation of operations for a device: the one place that asks what works here.

It knows device types. Within an implementation dtype and shape decide, and what it does not take is torch's.
"""

from __future__ import annotations

from functools import cache

from trtrun.kernels.cpu.operations import CpuOperations
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kernels.triton.support import triton_works


@cache
def operations_of(device_type: str) -> TorchOperations:
    """The implementation for devices of a type, such as "cpu" or "cuda"."""
    if triton_works(device_type):
        from trtrun.kernels.triton.compilation.launches import watch_compilations
        from trtrun.kernels.triton.operations import TritonOperations

        watch_compilations()
        return TritonOperations()
    return CpuOperations() if device_type == "cpu" else TorchOperations()
