"""Graphs of work on tensors of fixed place, by shape: made when a shape comes up first, and replayed from then on.

It knows shapes as keys, inputs and an output. It does not know what is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from trtrun.kernels.torch.cuda import capturing
from trtrun.warmup_misses import count_capture

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


MOST_GRAPHS = 224
"""Graphs kept of one kind of work, or all that a start makes where these are more. Each holds its nodes on the device
and a share of the pool."""


@dataclass(frozen=True)
class Captured:
    """One graph, the tensors that it reads, and writes where it goes on from them, and what it leaves its result in."""

    inputs: tuple[torch.Tensor, ...]
    replay: Callable[[], None]
    output: torch.Tensor


class GraphCache:
    """Graphs of one kind of work: those of a start, and others that are made when a shape comes up first.

    The least recently used one is given back when there are too many. Shapes follow from plans, so that all ranks of a
    tensor-parallel group capture and give back alike.

    Attributes:
        most_graphs: how many are kept.
        position_inputs: which of the inputs are positions, where -1 is padding.
    """

    position_inputs: Sequence[int] = (1,)

    def __init__(
        self,
        capture: Capture,
        most_graphs: int = MOST_GRAPHS,
        first_run: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make graphs with `capture`, and keep `most_graphs` of them.

        Args:
            capture: see `Capture`.
            most_graphs: to keep.
            first_run: surrounds the run of work before it is captured, in which each of its kernels is to run once.
        """
        self._capture = capture
        self._first_run = first_run
        self.most_graphs = most_graphs
        self._graphs: OrderedDict[Hashable, Captured] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Shapes that are held."""
        return len(self._graphs)

    def close(self) -> None:
        """Give all graphs back. NCCL waits for ever for a graph that still holds one of its operations when the
        communicator is destroyed, so this comes first."""
        self._graphs.clear()

    def _ready(
        self,
        shape: Hashable,
        make_fixed: Callable[[], Sequence[torch.Tensor]],
        work: Callable[..., torch.Tensor],
        make_output: Callable[[], torch.Tensor] | None,
        inputs: Sequence[torch.Tensor | None],
    ) -> Captured:
        """The graph of `shape` with `inputs` where it reads them: tokens, positions, block tables and whatever else; it
        is made first if need be, and writes to what `make_output` gives, or to its tokens."""
        captured = self._graphs.get(shape)
        if captured is None:
            fixed = make_fixed()
            captured = self._graphs[shape] = self._make(shape, fixed, work, make_output() if make_output else fixed[0])
            # Now and not before: capturing has waited for the device, so that none of the others is still running.
            if len(self._graphs) > self.most_graphs:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
        _fill(captured.inputs, inputs, self.position_inputs)
        return captured

    def _make(
        self, shape: Hashable, fixed: Sequence[torch.Tensor], work: Callable[..., torch.Tensor], output: torch.Tensor
    ) -> Captured:
        """Run the work as it is on padding, which warms it up, and capture it. It writes to the null block alone."""
        for index in self.position_inputs:
            fixed[index].fill_(-1)

        def run() -> None:
            output.copy_(work(*fixed))

        with self._first_run():
            run()
        return Captured(tuple(fixed), self._capture(run), output)


def _fill(fixed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None], position_inputs: Sequence[int]) -> None:
    """Copy tokens, positions, block tables and parameters to where a graph reads them; the rows that it has beside them
    are padding, and so are its queries."""
    for index in position_inputs:
        positions = inputs[index]
        assert positions is not None
        rows, queries = positions.shape[:2]
        if rows < fixed[index].shape[0] or queries < fixed[index].shape[1]:
            fixed[index].fill_(-1)
    places, tensors = [], []
    for place, tensor in zip(fixed, inputs, strict=True):
        if tensor is not None:
            part = place[tuple(map(slice, tensor.shape))]
            if part.is_contiguous():
                places.append(part)
                tensors.append(tensor)
            else:
                part.copy_(tensor)
    torch._foreach_copy_(places, tensors)  # one launch on a GPU, as all are dense
