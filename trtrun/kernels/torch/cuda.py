"""CUDA through torch: capturing graphs, branches beside the current stream, and which kernels of cuBLAS may be used."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

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


def forbid_split_sums() -> bool:
    """Let products of half precision on CUDA add up over their inputs in one chain, in this process from now on.

    cuBLAS splits the sums of some products over programs where there are few rows, so that a row's bits depend on how
    many others there are. Only cuBLASLt can be asked not to.

    Returns:
        Whether torch can be told that.
    """
    matmul = torch.backends.cuda.matmul
    try:
        if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
            torch.backends.cuda.preferred_blas_library("cublaslt")  # says that it is experimental
        matmul.allow_bf16_reduced_precision_reduction = (False, False)  # reduced precision, split sums
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture the block's work on the current CUDA device.

    Python collects no garbage meanwhile: an earlier graph that it freed would end the capture, as a graph may not be
    destroyed while a stream is captured. Nor do other threads (the heartbeat) end it.

    Args:
        graph: gets the work.
        pool: of memory that graphs share (`torch.cuda.graph_pool_handle`); None gives it one of its own.

    Raises:
        RuntimeError: the block did what cannot be captured.
    """
    stream = _capture_stream(torch.cuda.current_device())
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if was_collecting:
            gc.enable()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream for captures on a device. torch's own is that of the device which the process captured on first."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side_stream(stream)  # made now, so that none is made while something is captured
    return stream
