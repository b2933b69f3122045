"""How work on tensors of fixed place becomes something that does it again: CUDA graphs on a GPU.

It knows a device. It does not know what is captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.first_uses import count_capture
from trtrun.kernels.torch.cuda import capturing

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns work on tensors of fixed place into something that does it again when called."""


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: they are replayed one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work`, which has run once before: libraries allocate at their first use, which a graph cannot."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            work()
        count_capture()
        return graph.replay


def capture_for(device: torch.device) -> Capture | None:
    """What captures the forwards of an engine on `device`: CUDA graphs on a GPU, nothing elsewhere."""
    return CudaCapture(device) if device.type == "cuda" else None
