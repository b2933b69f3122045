"""Sums of floating-point tensors that NCCL moves and torch adds up, in the order of the ranks.

NCCL's own sums of three or more ranks may add in another order for another size of message. Of two they may not: a + b
is b + a, and is rounded once in float32 as in the half types, whose sum of two has one nearest value whichever way it
is reached. So a group of two may use them.

Calls enqueue and return, as NCCL's do. It knows raw pointers and ranks; it does not know which way is better for a
size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from parallel.transports.ordered_sum import add_up, needs_total, slice_bounds


class NcclSums:
    """Sums over the ranks of one NCCL communicator, in place. Tensors are contiguous and not empty."""

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
