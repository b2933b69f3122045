"""Whose each moment of a device is: products, other kernels, or nobody's. It knows times, and names of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

PRODUCT = re.compile(r"product_kernel|_stream\w*_kernel|_heads_kernel|_gate_up_kernel|gemm|nvjet|cutlass|xmma|aten::mm")
"""Kernels that multiply by weights: this project's in Triton, and cuBLAS's."""


class Kernel(NamedTuple):
    """A kernel that ran, or a copy: nanoseconds."""

    name: str
    start: int
    end: int


@dataclass
class Share:
    """What kernels of a name took of a span of time, in nanoseconds.

    Attributes:
        calls: of them that began in it.
        own: while nothing ran that had begun before it. Kernels that begin early wait for those before them, so along
            a chain of such kernels it is the time from the end of the one before to its own.
        running: of all, whatever ran beside.
        idle_behind: until the next kernel began, where nothing ran meanwhile.
    """

    calls: int = 0
    own: int = 0
    running: int = 0
    idle_behind: int = 0


def is_product(name: str) -> bool:
    """Whether a kernel multiplies by weights."""
    return PRODUCT.search(name) is not None


def sweep(kernels: Iterable[Kernel], start: int, end: int) -> dict[str, Share]:
    """Shares of the time from `start` to `end` by name; what is own and idle behind of all adds up to it, but for the
    time before the first kernel."""
    inside = sorted(
        (Kernel(kernel.name, max(start, kernel.start), min(end, kernel.end)) for kernel in kernels
         if kernel.end > start and kernel.start < end),
        key=lambda kernel: (kernel.start, kernel.end),
    )  # fmt: skip
    shares: dict[str, Share] = {}
    for kernel in inside:
        share = shares.setdefault(kernel.name, Share())
        share.calls += 1
        share.running += kernel.end - kernel.start
    moments = sorted({moment for kernel in inside for moment in kernel[1:]})
    running: list[Kernel] = []
    place, last = 0, None
    for moment, following in pairwise([*moments, end]):
        while place < len(inside) and inside[place].start <= moment:
            running.append(inside[place])
            place += 1
        last = next((kernel for kernel in running if kernel.end <= moment), last)
        running = [kernel for kernel in running if kernel.end > moment]
        if running:
            shares[min(running, key=lambda kernel: kernel.start).name].own += following - moment
        elif last is not None:
            shares[last.name].idle_behind += following - moment
    return shares
