"""Tensors that the host fills and a device computes with, made without waiting for the device; and torch's mode for it.

It knows numbers. It does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""That weights and activations may have, by the names that configurations and checkpoints use."""


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def numbers_at_a_time(device: torch.device) -> int:
    """Numbers of a weight that are converted together where it is loaded: few on CPUs, so that copies stay in the
    cache, and more on GPUs, whose time would go into launches: 64 MiB in float32."""
    return 1 << 20 if device.type == "cpu" else 1 << 24


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.inference_mode()` around a function. Where a caller has entered it already nothing is done: each entry
    takes microseconds of the host's time, and a round goes through several such functions."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


def device_integers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 tensor on `device`, copied without waiting for the device (`torch.tensor(..., device=...)` would wait)."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def to_host(source: Tensor) -> Tensor:
    """`source` itself on the CPU; else pinned memory that has its contents once the device has done what it was given,
    for which nothing waits here."""
    if source.is_cpu:
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


def cached_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """`device_integers` of what comes round after round, such as rows and lengths. Nobody may change the tensor.

    The last ones are kept: a copy takes ten microseconds of the host's time, in which a GPU has nothing to do.
    """
    return _kept(tuple(values), device)


def cached_range(start: int, stop: int, device: torch.device) -> Tensor:
    """`torch.arange(start, stop)` int64 on `device`, made once. Nobody may change the tensor. A CUDA graph that is
    captured makes its own: it would go on reading one that is not kept any more."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(start, stop, device=device)
    return _cached_range(start, stop, device)


@lru_cache(maxsize=64)
def _cached_range(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)


@lru_cache(maxsize=1024)
def _kept(values: tuple[int, ...], device: torch.device) -> Tensor:
    return device_integers(values, device)
