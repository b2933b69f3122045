"""The Communicator protocol: what one group of ranks can do with tensors, whatever carries them.

Transports implement it (`parallel.transports`); models, engines and the link use it and never learn which one they
have. A communicator knows its group and its device. It knows no role, no model and no shard arithmetic.

Rules that hold for every transport:

- dtypes: float32, float16, bfloat16, int32, int64, uint8, bool. Any strides, any shape, also empty.
- Shapes and dtypes are known on both sides beforehand; nothing about them travels.
- Collectives are called by all ranks of the group in the same order, with equal shapes and dtypes.
- A tensor lives on the communicator's device (`device`).
- An empty tensor sends no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from parallel.errors import CommunicatorError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class SumTiming:
    """How long sums of one size take, and how they are made.

    Attributes:
        nbytes: of the message.
        way: how messages of this size are summed.
        microseconds: of every way that was timed, by name.
    """

    nbytes: int
    way: str
    microseconds: Mapping[str, float]


@dataclass(frozen=True)
class PeerRows:
    """Memory in which kernels of others than the transport sum rows over the ranks, in one step with what they do with
    the sums: each rank writes its numbers into the memory of all others, and reads its own. A kernel's programs have a
    row each.

    Places are of 8 bytes: 4 of a row, and in the upper half the number of the row's call, with the highest bit set. So
    what has this call's number has this call's data. A row's calls take slots in turn; `calls` counts them.

    Attributes:
        rank: this process's place in the group.
        ranks: of the group.
        rows: of a call, at most.
        words: of 4 bytes in a row, at most.
        slots: of each row's places.
        calls: address on the device of [rows] uint32: how many calls each row has had.
        own: address of this rank's places, [slots, ranks, rows, words] of 8 bytes, zero at first; a rank's words lie at
            its own number.
        others: addresses of the other ranks' places, beginning with the next rank's and ending with the one before.
    """

    rank: int
    ranks: int
    rows: int
    words: int
    slots: int
    calls: int
    own: int
    others: tuple[int, ...]


@runtime_checkable
class Communicator(Protocol):
    """One group of ranks that exchange tensors.

    Attributes:
        rank: this process's place in the group, in [0, size).
        size: ranks of the group.
        name: for messages, such as "target".
        device: where the tensors of all calls live.
        is_capturable: whether a CUDA graph can hold its operations: they only enqueue, and never touch the host.
        sum_timings: what `warm_up` measured to choose how sums are made; empty where there is no choice.
        peer_rows: where kernels sum rows themselves; None where they cannot.
    """

    rank: int
    size: int
    name: str
    device: torch.device
    is_capturable: bool
    sum_timings: tuple[SumTiming, ...]
    peer_rows: PeerRows | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it. The result is bit-identical on all ranks.

        Elements are added up in the order of the ranks, whatever the size of the tensor: float16 and bfloat16 in
        float32, rounded once. So an element's bits do not depend on what is summed beside it. The sum of bools is
        their logical or.
        """
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor`, in rank order."""
        ...

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send `tensor`[r], of [size, …], to each rank r; return a new tensor of its shape with what each rank sent to
        this one, in rank order."""
        ...

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor` at rank `root`; None elsewhere."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite `tensor` with rank `root`'s, in place, and return it."""
        ...

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send `tensor` to another rank; on return it may be overwritten (CUDA: on the current stream)."""
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite `tensor` with what rank `source` sends, and return it. Messages of a pair keep their order."""
        ...

    def barrier(self) -> None:
        """Return when every rank of the group has called."""
        ...

    def warm_up(self) -> None:
        """Use every operation once, with every peer, so that no connection is made under load. Collective."""
        ...

    def abandon(self) -> None:
        """End what is under way with a rank that is gone, where a device would wait for it for ever. Not collective;
        the communicator is not used afterwards, but to be closed."""
        ...

    def close(self) -> None:
        """Give the transport's resources back. Collective; the communicator is not used afterwards."""
        ...


def check_dtype(communicator: Communicator, tensor: torch.Tensor) -> None:
    """Raise CommunicatorError unless tensors of this dtype can travel."""
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CommunicatorError(f"{communicator.name}: tensors of {tensor.dtype} cannot be sent (known: {known})")


def check_tensor(communicator: Communicator, tensor: torch.Tensor) -> None:
    """Raise CommunicatorError unless `tensor` has a dtype that can travel and is on the communicator's device."""
    check_dtype(communicator, tensor)
    if tensor.device.type != communicator.device.type:
        raise CommunicatorError(
            f"{communicator.name}: a tensor on {tensor.device} was given to a communicator of {communicator.device}"
        )


def check_parts(communicator: Communicator, tensor: torch.Tensor) -> None:
    """Raise CommunicatorError unless `tensor` has a part for each rank, and is as `check_tensor` wants it."""
    check_tensor(communicator, tensor)
    if tensor.shape[:1] != (communicator.size,):
        raise CommunicatorError(
            f"{communicator.name}: {communicator.size} ranks exchange as many parts, not {list(tensor.shape[:1])}"
        )


def check_peer(communicator: Communicator, peer: int) -> None:
    """Raise CommunicatorError unless `peer` is another rank of the group."""
    if not 0 <= peer < communicator.size or peer == communicator.rank:
        raise CommunicatorError(
            f"{communicator.name}: rank {communicator.rank} of {communicator.size} exchanges no message with {peer}"
        )


def check_root(communicator: Communicator, root: int) -> None:
    """Raise CommunicatorError unless `root` is a rank of the group."""
    if not 0 <= root < communicator.size:
        raise CommunicatorError(f"{communicator.name}: there is no rank {root} in a group of {communicator.size}")


def use_every_operation(communicator: Communicator) -> None:
    """Do every operation once, with every peer: what `warm_up` of a transport calls. Collective."""
    rank, size = communicator.rank, communicator.size
    for dtype in (torch.float32, torch.bfloat16):
        communicator.all_reduce(torch.ones(1, dtype=dtype, device=communicator.device))
    communicator.all_gather(torch.ones(1, device=communicator.device))
    communicator.all_to_all(torch.ones(size, device=communicator.device))
    for root in range(size):
        communicator.gather(torch.ones(1, device=communicator.device), root)
        communicator.broadcast(torch.ones(1, device=communicator.device), root)
    note = torch.ones(1, device=communicator.device)
    # All ranks walk the ordered pairs alike, so that no two wait for each other.
    for source in range(size):
        for destination in range(size):
            if rank == source and source != destination:
                communicator.send(note, destination)
            elif rank == destination and source != destination:
                communicator.recv(note, source)
    communicator.barrier()
