"""A capture of a CUDA graph is not ended by what Python does beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from gpus import needs_gpu, needs_two_gpus

from trtrun.kernels.torch import cuda
from trtrun.kernels.torch.cuda import capturing


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether Python collected garbage when each capture began."""
    seen: list[bool] = []

    @contextmanager
    def graph(*_arguments: Any, **_options: Any) -> Iterator[None]:
        seen.append(gc.isenabled())
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_capture_stream", lambda device: None)
    return seen


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_in_a_capture(captures: list[bool], collects: bool, fails: bool) -> None:
    graph: Any = None
    was_collecting = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with suppress(ZeroDivisionError), capturing(graph):
            assert not gc.isenabled()
            if fails:
                raise ZeroDivisionError
        assert captures == [False]
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was_collecting else gc.disable)()


class Holder:
    """Something that only the garbage collector frees, and a graph with it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph
        self.itself = self


@needs_gpu
def test_an_earlier_graph_that_is_garbage_does_not_end_a_capture() -> None:
    values = torch.zeros(8, device="cuda")
    values.add_(1)
    torch.cuda.synchronize()

    def capture(num_objects: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            values.add_(1)
            _garbage = [[number] for number in range(num_objects)]
        return graph

    Holder(capture(0))
    graph = capture(200_000)  # many times what the collector waits for
    values.zero_()
    graph.replay()
    assert values.tolist() == [1.0] * 8


@needs_two_gpus
def test_each_gpu_of_a_process_captures_on_itself() -> None:
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            values = torch.zeros(8, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                assert torch.cuda.current_device() == device
                values.add_(1)
            graph.replay()
            assert values.tolist() == [1.0] * 8
