"""Kernels that begin while the one before them ends: programmatic dependent launch, of compute capability 9.0 on.

A kernel that lets the next one begin gets its programs onto multiprocessors that have room already; they wait until all
before them is written. Until then they may do what depends on nothing: ask for the weights that they will read, so that
memory is busy while small kernels run. In a chain each kernel waits before it reads, writes or ends, so whoever has
waited for the last one has waited for all (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization").

A kernel may wait first and only then let the next one begin. Whatever was written before that kernel is there when
programs of the next one run, so that these may look up in it, past their own cache, which weights to ask for. What is
computed with they read once they have waited, like all others; a wrong look costs time alone.

It knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_LINE_BYTES = 128
"""What memory is asked for at a time."""

_FETCHED_BYTES = 1 << 14
"""Bytes of its weights that a program asks for beforehand, at most. On an H200 a token of an 8B model took 4.14 ms
without, 4.11 with so many, and longer than without from 64 KiB on, which are in the way of the kernel before."""


@cache
def _options(device: torch.device) -> dict[str, Any]:
    begins_early = (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"EARLY": True, "launch_pdl": True} if begins_early else {"EARLY": False}


def early(tensor: torch.Tensor) -> dict[str, Any]:
    """The arguments of a launch on the tensor's device: EARLY, for the kernel, and what the launch needs for it."""
    return _options(tensor.device)


def lets_next_begin(tensor: torch.Tensor) -> dict[str, Any]:
    """Options for a kernel that itself begins when all before it has ended, as one must that waits for another stream
    than its own (kernels.torch.cuda); the next one of its stream may begin early."""
    options = early(tensor)
    return options | {"launch_pdl": False} if options["EARLY"] else options


def lines_of(weight: torch.Tensor, features: int) -> int:
    """Lines of each of `features` rows of a weight that a program asks for beforehand: a power of two."""
    row_bytes = weight.shape[1] * weight.itemsize
    lines = min(_FETCHED_BYTES // features, row_bytes) // _LINE_BYTES
    return 1 << max(0, lines.bit_length() - 1)


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """Let the next kernel begin. Before anything else but `fetch`, or right behind `wait_for_all`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_all(EARLY: tl.constexpr):
    """Wait until all before this kernel is written."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    """Both. Before anything else but `fetch`."""
    launch_next(EARLY)
    wait_for_all(EARLY)


@triton.jit
def fetch(weight, start, inputs, LINES: tl.constexpr, EARLY: tl.constexpr):
    """Ask for the first LINES lines of the rows that begin at `start` ([features] int64), before `begin`."""
    if EARLY:
        line: tl.constexpr = 8 * 128 // weight.dtype.element_ty.primitive_bitwidth
        at = tl.minimum(tl.arange(0, LINES) * line, inputs - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + start[:, None] + at[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
