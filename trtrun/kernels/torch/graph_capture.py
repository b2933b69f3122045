"""Capturing a CUDA graph while nothing else of the process disturbs it.

It knows threads and Python's garbage. It does not know what is captured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from trtrun.kernels.torch.side_branch import side_stream


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
