"""Whether Triton's kernels run in this process: asked once, by running one.

Triton comes with CUDA builds of torch, but compiles its kernels when they are first used, which needs a C compiler.
Where it does not work, plain torch operations take its place. It knows no kernel of a model.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

_SPARE_BYTES = 2048
"""Shared memory that a program needs beside its stages."""

_logger = logging.getLogger(__name__)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether the matrix units of a CUDA device take E4M3: those of compute capability 8.9, and from 9.0 on."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program of a kernel may use for its stages; as much as it likes where there is no GPU."""
    if device.type != "cuda":
        return 1 << 30
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"]) - _SPARE_BYTES


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device; an H200's 132 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def triton_works(device_type: str) -> bool:
    """Whether kernels can be compiled and give right results on this process's current device of that type."""
    if device_type != "cuda" or torch.version.hip is not None:
        return False
    try:
        from trtrun.kernels.triton.fused import activate_and_multiply

        sample = torch.ones((1, 4), device="cuda")
        result = activate_and_multiply(sample).cpu()
    except Exception as error:  # import, compiler, driver: whatever it is, there is another way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _logger.warning("Triton does not work here (%s): slower plain kernels run instead", reason)
        return False
    return bool(torch.allclose(result, torch.nn.functional.silu(torch.ones((1, 2)))))
