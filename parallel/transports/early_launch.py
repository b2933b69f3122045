"""Launching a kernel that begins while the one before it ends: programmatic dependent launch, of compute capability 9.0
on (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").

CuPy's driver has no word for it, so CUDA's own library is called. It knows a kernel by its handle. What the kernel does
to wait for all before it is its own: see `begin` in peer_all_reduce.cu.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from parallel.errors import CommunicatorError

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; its value is a union of 64 bytes, which begins with the number."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def begins_early(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def launch_early(kernel: int, blocks: int, threads: int, stream: int, arguments: int) -> None:
    """Enqueue a kernel in the current context.

    Args:
        kernel: its handle.
        blocks, threads: of the grid, and of a block, in one dimension.
        stream: handle of the stream.
        arguments: address of an array of pointers to the arguments, which are copied.

    Raises:
        CommunicatorError: the driver refuses.
    """
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    one = (ctypes.c_uint * 3)(1, 1, 1)
    config = _Config(one, one, 0, stream, ctypes.pointer(attribute), 1)
    config.grid[0], config.block[0] = blocks, threads
    status = _library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(kernel), ctypes.c_void_p(arguments), ctypes.c_void_p(0)
    )
    if status:
        raise CommunicatorError(f"CUDA's driver refuses to launch a sum over the ranks: error {status}")
