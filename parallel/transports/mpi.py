"""MPI transport: host tensors as bytes; CUDA tensors through a pinned host buffer, where NCCL is not to be had.

Sums are made here and not by MPI_Allreduce: each rank gathers the others' tensors and adds them up in rank order, in
float32 for the half types, rounding once. So the sum of an element depends on nothing but the ranks' values: not on the
tensor's shape, on how many rows share the batch, or on the algorithm that MPI picks for a message size. Lossless
greedy decoding with more than two ranks rests on that. It is also faster for small tensors: half the bytes in
bfloat16, and no reduction inside MPI.

It knows bytes and ranks; it knows no role and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mpi4py import MPI
from typing_extensions import override

from parallel.communicator import (
    Communicator,
    SumTiming,
    check_dtype,
    check_parts,
    check_peer,
    check_root,
    check_tensor,
    use_every_operation,
)
from parallel.errors import CommunicatorError
from parallel.transports.sums import add_up, needs_total, slice_bounds
from parallel.waiting import Waiter, wait_until

TAG = 1
# From this size on, a group of three or more reduces slices and gathers the sums: fewer bytes, two steps.
SLICED_BYTES = 256 * 1024
# MPI counts are 32-bit.
MOST_BYTES = 2**31 - 1
# Larger tensors are summed piece by piece. A piece and the others' fit into a cache, so it is faster, too.
PIECE_BYTES = 4 * 1024 * 1024
CACHED_SHAPES = 256
ALIGNMENT = 64


@dataclass(frozen=True)
class _Gathered:
    """Where tensors of one shape and dtype are gathered: every rank's, as tensors and as one MPI buffer.

    All shapes share one piece of memory, as no sum outlives the call that makes it.
    """

    nbytes: int
    is_whole: bool  # else it is summed in slices or in pieces
    buffer: tuple[MPI.memory, int, MPI.Datatype]
    parts: tuple[torch.Tensor, ...]
    total: torch.Tensor | None  # float32, where the parts are half and more than two


class MpiCommunicator(Communicator):
    """A Communicator over MPI; see the protocol for shapes and errors.

    Collectives block inside MPI, since their peers are at the same point of the same forward. `send` and `recv` sleep
    while they wait, since their peer may be anywhere; `recv` only after the time that a peer's message usually takes,
    where this rank may spin.
    """

    is_capturable = False
    sum_timings: tuple[SumTiming, ...] = ()

    def __init__(
        self, comm: MPI.Intracomm, name: str = "mpi", device: torch.device | None = None, may_spin: bool = False
    ) -> None:
        """Take over `comm`: nobody else may use it, and `close` frees it.

        Args:
            comm: an MPI communicator made for this group alone (Dup, Split or Create_group).
            name: for messages.
            device: where the tensors live: the CPU (default) or a CUDA device.
            may_spin: whether this rank has a core to itself while it waits in `recv` (see Waiter).
        """
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.name = name
        self.device = device or torch.device("cpu")
        self._comm = comm
        self._staged = self.device.type != "cpu"
        self._waiters = [Waiter(may_spin) for _ in range(self.size)]
        self._gathered: dict[tuple[torch.Size, torch.dtype], _Gathered] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in rank order, in place; the module says why in rank order."""
        if tensor.is_cpu and tensor.is_contiguous() and not self._staged:
            return self._sum(tensor)
        check_tensor(self, tensor)
        return tensor.copy_(self._sum(tensor.cpu().contiguous()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor`."""
        source = self._host_copy(tensor)
        result = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        if source.numel():
            nbytes = source.numel() * source.element_size()
            self._comm.Allgather((_memory(source), MPI.BYTE), (_memory(result), nbytes, MPI.BYTE))
        return result.to(self.device) if self._staged else result

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of what each rank sent to this one."""
        check_parts(self, tensor)
        source = self._host_copy(tensor)
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        if source.numel():
            nbytes = source.numel() * source.element_size() // self.size
            self._comm.Alltoall((_memory(source), nbytes, MPI.BYTE), (_memory(result), nbytes, MPI.BYTE))
        return result.to(self.device) if self._staged else result

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor` at `root`, None elsewhere."""
        check_root(self, root)
        source = self._host_copy(tensor)
        nbytes = source.numel() * source.element_size()
        if self.rank != root:
            if nbytes:
                self._comm.Gather((_memory(source), MPI.BYTE), None, root)
            return None
        result = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        if nbytes:
            self._comm.Gather((_memory(source), MPI.BYTE), (_memory(result), nbytes, MPI.BYTE), root)
        return result.to(self.device) if self._staged else result

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite `tensor` with rank `root`'s, in place."""
        check_root(self, root)
        host = self._host_copy(tensor)
        if host.numel():
            self._comm.Bcast((_memory(host), MPI.BYTE), root)
            if self.rank != root and host is not tensor:
                tensor.copy_(host)
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send to `destination`; sleeps until the buffer may be used again."""
        check_peer(self, destination)
        host = self._host_copy(tensor)
        if host.numel():
            wait_until(self._comm.Isend((_memory(host), MPI.BYTE), destination, TAG).Test)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive from `source` into `tensor`; sleeps where the message takes longer than usual."""
        check_peer(self, source)
        check_tensor(self, tensor)
        direct = not self._staged and tensor.is_contiguous()
        host = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._staged)
        nbytes = host.numel() * host.element_size()
        if not nbytes:
            return tensor
        status = MPI.Status()
        request = self._comm.Irecv((_memory(host), MPI.BYTE), source, TAG)
        self._waiters[source].wait(lambda: request.Test(status))
        if status.Get_count(MPI.BYTE) != nbytes:
            raise CommunicatorError(
                f"{self.name}: rank {source} sent {status.Get_count(MPI.BYTE)} bytes where {nbytes} were due "
                f"({list(tensor.shape)} {tensor.dtype}): the ranks disagree about the plan"
            )
        if not direct:
            tensor.copy_(host)
        return tensor

    def barrier(self) -> None:
        """Return when every rank has called; CUDA work of this rank is finished by then."""
        if self._staged:
            torch.cuda.synchronize(self.device)
        self._comm.Barrier()

    def warm_up(self) -> None:
        """Use every operation once, with every peer."""
        use_every_operation(self)

    @override
    def abandon(self) -> None:
        """Do nothing: no device waits for MPI."""

    def close(self) -> None:
        """Free the MPI communicator and the buffers."""
        self._gathered.clear()
        self._memory = self._memory[:0].clone()
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def _sum(self, host: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous host tensor over the ranks, in place. A few µs long, and on the path of every layer."""
        gathered = self._gathered.get((host.shape, host.dtype)) or self._make_gathered(host)
        if not gathered.is_whole:
            return self._sum_sliced(host) if self.size > 2 else self._sum_pieces(host)
        if gathered.nbytes and self.size > 1:
            self._comm.Allgather((MPI.memory.fromaddress(host.data_ptr(), gathered.nbytes), MPI.BYTE), gathered.buffer)
            add_up(gathered.parts, gathered.total, host)
        return host

    def _make_gathered(self, host: torch.Tensor) -> _Gathered:
        """Make and keep the places to receive tensors like this one, after checking that they can travel."""
        check_dtype(self, host)
        if len(self._gathered) >= CACHED_SHAPES:
            self._gathered.clear()
        nbytes = host.numel() * host.element_size()
        is_whole = nbytes < SLICED_BYTES if self.size > 2 else nbytes <= PIECE_BYTES
        buffer, total = self._reserve(host) if is_whole else (torch.empty(0), None)
        gathered = _Gathered(
            nbytes=nbytes,
            is_whole=is_whole,
            buffer=(_memory(buffer), nbytes if is_whole else 0, MPI.BYTE),
            parts=tuple(buffer),
            total=total,
        )
        self._gathered[host.shape, host.dtype] = gathered
        return gathered

    def _reserve(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places for every rank's tensor, and for their sum where it needs one (`needs_total`).

        They are in the memory that all shapes share; it grows to the size of the largest.
        """
        count = host.numel() * self.size
        middle = -(-count * host.element_size() // ALIGNMENT) * ALIGNMENT
        end = middle + (4 * host.numel() if needs_total(host.dtype, self.size) else 0)
        if end > self._memory.numel():
            self._gathered.clear()  # they are places in the old memory
            self._memory = torch.empty(1 << (end - 1).bit_length(), dtype=torch.uint8)
        buffer = self._memory[: count * host.element_size()].view(host.dtype).view(self.size, *host.shape)
        if not needs_total(host.dtype, self.size):
            return buffer, None
        return buffer, self._memory[middle:end].view(torch.float32).view(host.shape)

    def _sum_pieces(self, host: torch.Tensor) -> torch.Tensor:
        """Sum a large contiguous tensor of a group of two in pieces: the same sums, and little memory."""
        flat, width = host.view(-1), PIECE_BYTES // host.element_size()
        for start in range(0, flat.numel(), width):
            self._sum(flat[start : start + width])
        return host

    def _sum_sliced(self, host: torch.Tensor) -> torch.Tensor:
        """Sum a large contiguous tensor: each rank adds up one slice in rank order, then the slices are gathered.

        Bit-equal to gathering everything, with 2 (size - 1) / size of the tensor sent by each rank.
        """
        flat, width = host.view(-1), host.element_size()
        bounds = slice_bounds(flat.numel(), self.size)
        starts = [start * width for start in bounds[:-1]]
        counts = [stop * width - start for stop, start in zip(bounds[1:], starts, strict=True)]
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        received = torch.empty((self.size, own.numel()), dtype=host.dtype)
        share = counts[self.rank]
        shares = ([share] * self.size, [share * rank for rank in range(self.size)])
        whole = (_memory(flat), (counts, starts), MPI.BYTE)
        self._comm.Alltoallv(whole, (_memory(received), shares, MPI.BYTE))
        total = torch.empty(own.shape, dtype=torch.float32) if needs_total(own.dtype, self.size) else None
        add_up(tuple(received), total, own)
        self._comm.Allgatherv(MPI.IN_PLACE, whole)
        return host

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself where MPI can read it in place, else a contiguous host copy of it."""
        check_tensor(self, tensor)
        return tensor.cpu().contiguous()


def _memory(host: torch.Tensor) -> MPI.memory:
    """Return the bytes of a contiguous host tensor as a buffer that MPI reads and writes in place."""
    nbytes = host.numel() * host.element_size()
    if nbytes > MOST_BYTES:
        raise CommunicatorError(f"a message of {nbytes} bytes is more than MPI takes at once ({MOST_BYTES})")
    return MPI.memory.fromaddress(host.data_ptr(), nbytes)
