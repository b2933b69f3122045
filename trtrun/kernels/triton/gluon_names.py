"""What Gluon calls otherwise from one version of Triton to the next: since 3.9 the copy engine's load, loads of
threads to shared memory, and looking at shared memory in another shape.

It knows Triton's versions. It does not know kernels.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_memory = gl.shared_memory_descriptor

copy_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""A descriptor, coordinates, the barrier that waits for it, and a place in shared memory."""

load_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""A place in shared memory, pointers, and a mask, zeros where it is not."""

reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
"""Shared memory, and the dtype, shape and layout that it is to have."""
