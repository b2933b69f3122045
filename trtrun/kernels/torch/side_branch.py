"""Kernels that a GPU may run beside those of the current stream; in a CUDA graph that is captured, a branch of its own.

It knows streams. It does not know what runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside(work: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Launch `work` on a stream beside the current one of a CUDA `device`, behind what that has been given so far. The
    block's kernels run beside it; what comes behind the block, whether it fails or not, runs behind both.

    Memory belongs to the current stream: tensors that `work` reads or writes are made before, and kept by the caller
    until the block has ended. Then whoever gets their memory next comes behind both, too, and whoever had it before
    came before both; so `work` makes no tensors, and the allocator need not know of it.

    The first kernel of `work`, and the first behind the block, may not begin early (early_launch.py): they wait for
    another stream than their own.
    """
    current = torch.cuda.current_stream(device)
    side = side_stream(current)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            work()
        yield
    finally:
        current.wait_stream(side)


@cache
def side_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream beside `stream`, which no other has, so that what one captures meets nothing that another is given.
    torch keeps streams of that priority apart; a multiprocessor that has room takes their programs first."""
    return torch.cuda.Stream(stream.device, priority=-1)  # type: ignore[no-untyped-call]
