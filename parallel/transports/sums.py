"""Sums of the ranks' tensors in the order of the ranks, and which way such a sum goes.

With torch's operations on any device: half types are added up in float32 and rounded once. So the sum of an element
depends on nothing but the ranks' values: not on the tensor's shape, nor on what else is summed beside it.

Over GPUs NCCL moves the tensors and torch adds them up. NCCL's own sums of three or more ranks may add in another order
for another size of message. Of two they may not: a + b is b + a, and is rounded once in float32 as in the half types,
whose sum of two has one nearest value whichever way it is reached. So a group of two may use them. Calls enqueue and
return, as NCCL's do.

Which way a sum goes depends on its size: ways are measured when a group is opened, the same on all ranks. All give the
same bits, so the choice is about time alone.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from parallel.communicator import SumTiming
from parallel.mpi_rank import all_gather_json

if TYPE_CHECKING:
    from mpi4py import MPI

MEASURED_BYTES = tuple(kib << 10 for kib in (8, 16, 64, 256, 1024, 8192))
"""Sizes of messages that are timed: from a row's hidden state to those of a prompt."""

_CALLS = 8  # in a graph, so that launching from the host is not what is timed
_REPLAYS = 5


class Way(enum.StrEnum):
    """How a sum is made."""

    ONE_SHOT = "peer memory, one shot"
    TWO_SHOT = "peer memory, two shots"
    NCCL = "NCCL"
    GATHERED = "NCCL all-gather, ordered sum"
    SLICED = "NCCL slices, ordered sum"


Add = Callable[[torch.Tensor], None]
"""Enqueues the sum of a contiguous tensor over the ranks, in place."""

Timed = Mapping[Way, Mapping[int, float]]
"""Microseconds of a sum by way and bytes of the message."""


class SumWays:
    """The ways of one group, and the choice among them."""

    def __init__(self, ways: Mapping[Way, Add], most_bytes: Mapping[Way, int]) -> None:
        """Choose the first way that takes a message, until there are times.

        Args:
            ways: those that add in the order of the ranks, in the order in which to prefer them.
            most_bytes: the largest message of those that do not take every size.
        """
        self._ways = ways
        self._most_bytes = most_bytes
        self._sizes: list[int] = []
        self._chosen: list[Way] = []

    def choose(self, nbytes: int) -> Way:
        """The way of a message of so many bytes: that of the next larger size that was timed, or of the largest."""
        if not self._sizes:
            return self.candidates(nbytes)[0]
        return self._chosen[min(bisect_left(self._sizes, nbytes), len(self._sizes) - 1)]

    def add(self, message: torch.Tensor) -> None:
        """Enqueue the sum of a contiguous tensor that is not empty, in place."""
        self._ways[self.choose(message.numel() * message.element_size())](message)

    def candidates(self, nbytes: int) -> list[Way]:
        """The ways that take a message of so many bytes."""
        return [way for way in self._ways if nbytes <= self._most_bytes.get(way, nbytes)]

    def decide(self, everyones: Sequence[Timed]) -> tuple[SumTiming, ...]:
        """Choose the way whose slowest rank is the fastest, for each size that was timed.

        Args:
            everyones: what each rank measured, the same list on all ranks.

        Returns:
            What was measured and chosen.
        """
        slowest = {
            way: {nbytes: max(timed[way][nbytes] for timed in everyones) for nbytes in times}
            for way, times in everyones[0].items()
        }
        sizes = sorted({nbytes for times in slowest.values() for nbytes in times})
        chosen = [min(self.candidates(nbytes), key=lambda way: slowest[way][nbytes]) for nbytes in sizes]
        self._sizes, self._chosen = sizes, chosen
        return tuple(
            SumTiming(nbytes, way, {name: times[nbytes] for name, times in slowest.items() if nbytes in times})
            for nbytes, way in zip(sizes, chosen, strict=True)
        )

    def measure(self, comm: MPI.Intracomm, device: torch.device, beside: Mapping[Way, Add]) -> tuple[SumTiming, ...]:
        """Time all ways on all sizes and choose. Collective over `comm`; takes some ten milliseconds.

        Args:
            comm: the group's ranks.
            device: this rank's CUDA device.
            beside: ways that are timed to compare with, and not chosen.
        """
        own: dict[Way, dict[int, float]] = {way: {} for way in (*self._ways, *beside)}
        with torch.cuda.device(device):
            for nbytes in reversed(MEASURED_BYTES):  # the long ones first: they wake a GPU that saved power
                message = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
                for way in dict.fromkeys((*self.candidates(nbytes), *beside)):
                    add = self._ways.get(way) or beside[way]
                    own[way][nbytes] = _time(add, message, comm)
        return self.decide([_read(timed) for timed in all_gather_json(comm, own)])


def _read(timed: Mapping[str, Mapping[str, float]]) -> Timed:
    """What a rank measured, as it came through JSON."""
    return {Way(way): {int(nbytes): time for nbytes, time in times.items()} for way, times in timed.items()}


def _time(add: Add, message: torch.Tensor, comm: MPI.Intracomm) -> float:
    """Microseconds of a sum inside a CUDA graph, on the current device. Collective."""
    add(message)  # what is allocated or connected at first use cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # Other threads of the process (the heartbeat) must not end the capture.
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            add(message)
        graph.capture_end()
    taken = []
    for _ in range(_REPLAYS):
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        comm.Barrier()
        started.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        taken.append(float(started.elapsed_time(ended)))
    graph.reset()  # NCCL waits for ever for graphs that hold its operations when a communicator is destroyed
    return round(min(taken) * 1e3 / _CALLS, 2)


HALF = (torch.float16, torch.bfloat16)


def needs_total(dtype: torch.dtype, size: int) -> bool:
    """Whether `size` tensors of this dtype are added up in float32 beside them: more than two of a half type."""
    return size > 2 and dtype in HALF


def add_up(parts: Sequence[torch.Tensor], total: torch.Tensor | None, result: torch.Tensor) -> None:
    """Write the sum of `parts`, in their order, to `result`; through `total` (float32) where `needs_total`."""
    if total is None:
        # Two half tensors need no `total`: torch adds them in float32 and rounds once.
        torch.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            result.add_(part)
    else:
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        result.copy_(total)


def slice_bounds(count: int, size: int) -> list[int]:
    """Where the slices of `count` elements begin that `size` ranks sum, and where the last ends: size + 1 numbers."""
    return [count * rank // size for rank in range(size + 1)]


class NcclSums:
    """Sums over the ranks of one NCCL communicator, in place, and parts for each. Tensors are contiguous, not empty."""

    def __init__(self, nccl: Any, handle: Any, types: dict[torch.dtype, int], rank: int, size: int) -> None:
        """Use a communicator that the caller owns.

        Args:
            nccl: CuPy's module.
            handle: its communicator.
            types: NCCL's number for each dtype.
            rank: this rank's place in the group.
            size: ranks of the group.
        """
        self._nccl = nccl
        self._handle = handle
        self._types = types
        self._rank = rank
        self._size = size

    def plain(self, message: torch.Tensor) -> None:
        """NCCL's own sum, or logical or of bools: in the order of the ranks only for two, or where no order matters."""
        operation = self._nccl.NCCL_MAX if message.dtype == torch.bool else self._nccl.NCCL_SUM
        pointer = message.data_ptr()
        kind = self._types[message.dtype]
        self._handle.allReduce(pointer, pointer, message.numel(), kind, operation, _stream(message))

    def gathered(self, message: torch.Tensor) -> None:
        """Every rank gets all messages and adds them up: one step, size times the message's memory."""
        flat = message.view(-1)
        parts = flat.new_empty((self._size, flat.numel()))
        kind = self._types[flat.dtype]
        self._handle.allGather(flat.data_ptr(), parts.data_ptr(), flat.numel(), kind, _stream(flat))
        add_up(parts.unbind(), self._total(flat), flat)

    def sliced(self, message: torch.Tensor) -> None:
        """Rank r adds up slice r, then the slices are gathered: two steps, the message's memory once more."""
        flat = message.view(-1)
        bounds = slice_bounds(flat.numel(), self._size)
        slices = [flat[start:stop] for start, stop in pairwise(bounds)]
        own = slices[self._rank]
        parts = own.new_empty((self._size, own.numel()))
        self._exchange(sent=slices, received=list(parts.unbind()))
        parts[self._rank].copy_(own)
        add_up(parts.unbind(), self._total(own), own)
        self._exchange(sent=[own] * self._size, received=slices)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send part r of [size, …] to each rank r, and receive from each what it sends to this one."""
        received[self._rank].copy_(sent[self._rank])
        self._exchange(sent=list(sent.unbind()), received=list(received.unbind()))

    def _exchange(self, sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """Send a tensor to each other rank and receive one from each; all at the same time, as one group."""
        stream = _stream(sent[0])
        self._nccl.groupStart()
        for step in range(1, self._size):
            destination, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            for move, tensor, peer in (
                (self._handle.send, sent[destination], destination),
                (self._handle.recv, received[source], source),
            ):
                if tensor.numel():
                    move(tensor.data_ptr(), tensor.numel(), self._types[tensor.dtype], peer, stream)
        self._nccl.groupEnd()

    def _total(self, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor to add up in, where one is needed."""
        return like.new_empty(like.shape, dtype=torch.float32) if needs_total(like.dtype, self._size) else None


def _stream(message: torch.Tensor) -> int:
    """torch's current stream as a raw handle; the caller's tensors belong to it, so no event is needed."""
    return int(torch.cuda.current_stream(message.device).cuda_stream)
