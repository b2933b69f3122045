"""Kernels that begin while the one before them ends: programmatic dependent launch, of compute capability 9.0 on.

A kernel that lets the next one begin gets its programs onto multiprocessors that have room already; they wait until all
before them is written. Until then they may do what depends on nothing: ask for the weights that they will read, so that
memory is busy while small kernels run. In a chain each kernel waits before it reads, writes or ends, so whoever has
waited for the last one has waited for all (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization").

Products of half precision, and those of few rows with experts, wait, and let the next kernel begin in the step in which
they have asked for the last of their weights. What the next ones ask for then fills the time in which they end, and is
in nobody's way: on an H200 a token of a mixture of Qwen3-30B-A3B's shape took 2.59 ms so, and 2.72 where products let
them begin first of all.

Behind a kernel that waits first, and then lets the next one begin, all is there that was written before it. Programs of
the next one may read that before they wait, past their own cache: where rows stand, or what states were. What only
says which weights to ask for they read again once they have waited; a wrong look costs time alone.

It knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

LINE_BYTES = 128
"""What memory is asked for at a time."""

FETCHED_BYTES = 1 << 15
"""Bytes of its weights that a program asks for beforehand, at most. On an H200 a token of a mixture of Qwen3-30B-A3B's
shape took 2.59 ms with half as many, 2.57 with these, and 2.63 with twice as many, which are in the way of the kernel
before; one of an 8B model took 3.99, 3.99 and 4.03."""


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
    lines = min(FETCHED_BYTES // features, row_bytes) // LINE_BYTES
    return 1 << max(0, lines.bit_length() - 1)


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """Let the next kernel begin: before anything else but `fetch`, or behind `wait_for_all`."""
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
def last_asked(inputs, INPUTS: tl.constexpr, STAGES: tl.constexpr):
    """The first input of that step of a loop over inputs, INPUTS at a time, in which all have been asked for: loads of
    STAGES - 1 steps are on their way. With one stage there is no such step: the next kernel begins at the end."""
    return tl.maximum((tl.cdiv(inputs, INPUTS) - STAGES + 1) * INPUTS, 0)


@triton.jit
def launch_next_at(first, chosen, EARLY: tl.constexpr):
    """Let the next kernel begin in one step of a loop, behind `wait_for_all`."""
    if first == chosen:
        launch_next(EARLY)


@triton.jit
def fetch(weight, start, inputs, LINES: tl.constexpr, EARLY: tl.constexpr):
    """Ask for the first LINES lines of the rows that begin at `start` ([features] int64), before `begin`."""
    if EARLY:
        line: tl.constexpr = 8 * 128 // weight.dtype.element_ty.primitive_bitwidth
        at = tl.minimum(tl.arange(0, LINES) * line, inputs - 1)
        ask_for(weight + start[:, None] + at[None, :])


@triton.jit
def ask_for(places):
    """Ask for the lines of memory that some places lie in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )
