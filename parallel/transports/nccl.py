"""NCCL transport: CUDA tensors, device to device, on torch's current stream.

CuPy brings the binding; it is imported when the first communicator is made, so that this module imports on machines
without CUDA. Calls enqueue and return: nothing here waits on the host, and the calls can be captured in a CUDA graph.

Floating-point sums are made in the order of the ranks: by kernels over peer memory where the group's GPUs reach each
other (`peer_all_reduce`), else from what NCCL moves (`nccl_sums`). Which way is the fastest for a size is measured in
`warm_up` (`parallel.transports.sums`).

It knows raw pointers and ranks; it knows no role and no model. MPI carries what ranks tell each other at start: the 128
bytes of the unique id, handles of memory and times.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from mpi4py import MPI
from typing_extensions import override

from parallel.communicator import (
    Communicator,
    SumTiming,
    check_parts,
    check_peer,
    check_root,
    check_tensor,
    use_every_operation,
)
from parallel.errors import CommunicatorError
from parallel.mpi_rank import all_gather_json
from parallel.transports.peer_all_reduce import MOST_RANKS, Layout, PeerAllReduce
from parallel.transports.peer_memory import PeerMemory, open_peer_memory
from parallel.transports.sums import MEASURED_BYTES, Add, NcclSums, SumWays, Way

UNIQUE_ID_BYTES = 128
GATHERED_BYTES = 256 << 10
"""The largest message whose parts every rank gathers, where NCCL moves them: size times the memory."""
CONSTANTS = {
    torch.float32: "NCCL_FLOAT32",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.uint8: "NCCL_UINT8",
    torch.bool: "NCCL_UINT8",  # NCCL has no bool: a byte of 0 or 1
}

logger = logging.getLogger(__name__)


def why_not(device: torch.device) -> str | None:
    """Return why NCCL cannot serve `device` in this process, None when it can."""
    if device.type != "cuda":
        return f"NCCL needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        importlib.import_module("cupy.cuda.nccl").get_version()
    except Exception as error:  # CuPy raises many kinds where CUDA or NCCL libraries are missing
        return f"CuPy's NCCL cannot be loaded ({type(error).__name__}): install the extra cuda12 or cuda13"
    return None


class NcclCommunicator(Communicator):
    """A Communicator over NCCL; see the protocol for shapes and errors."""

    is_capturable = True

    def __init__(
        self, comm: MPI.Intracomm, name: str, device: torch.device, sums_often: bool = True, peers: bool = True
    ) -> None:
        """Make the NCCL communicator of the ranks of `comm`. Collective.

        Args:
            comm: an MPI communicator made for this group alone; `close` frees it.
            name: for messages.
            device: this rank's CUDA device; no other rank of the group uses it.
            sums_often: whether sums are worth some memory, and some time at the start to measure them.
            peers: whether GPUs may use each other's memory for sums, where they can.

        Raises:
            CommunicatorError: NCCL cannot be used here.
        """
        reason = why_not(device)
        if reason:
            raise CommunicatorError(f"{name}: {reason}")
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.name = name
        self.device = device
        self._comm = comm
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self._types = {dtype: getattr(self._nccl, constant) for dtype, constant in CONSTANTS.items()}
        own_id = self._nccl.get_unique_id() if self.rank == 0 else b""
        message = bytearray(own_id if isinstance(own_id, bytes) else (byte & 0xFF for byte in own_id))
        message.extend(bytes(UNIQUE_ID_BYTES - len(message)))
        comm.Bcast((message, MPI.BYTE), 0)
        with torch.cuda.device(device):
            self._handle: Any = self._connect(bytes(message))
        self.sum_timings: tuple[SumTiming, ...] = ()
        self._sums_often = sums_often
        self._nccl_sums = NcclSums(self._nccl, self._handle, self._types, self.rank, self.size)
        self._memory: PeerMemory | None = None
        self._peers = self._open_peers() if sums_often and peers else None
        self._ways = self._list_ways(self._peers)

    def _connect(self, unique_id: bytes) -> Any:
        """Make CuPy's communicator. Collective."""
        try:
            return self._nccl.NcclCommunicator(self.size, unique_id, self.rank)
        except TypeError:  # before CuPy 14 the id was a tuple of signed chars
            signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
            return self._nccl.NcclCommunicator(self.size, signed, self.rank)

    def _open_peers(self) -> PeerAllReduce | None:
        """Open the group's memory to each other; None on all ranks where that cannot be. Collective."""
        if not 2 <= self.size <= MOST_RANKS:
            return None
        layout = Layout.of(self.size)
        self._memory = open_peer_memory(self._comm, self.device, layout.nbytes)
        if self._memory is None:
            return None
        try:
            kernels = PeerAllReduce(self._memory, layout, self.rank, self.device)
        except Exception as error:  # CuPy raises many kinds where there is no compiler
            logger.info("%s: no sums over peer memory (%s: %s)", self.name, type(error).__name__, error)
            kernels = None
        if all(all_gather_json(self._comm, kernels is not None)):
            return kernels
        self._memory.close()
        self._memory = None
        return None

    def _list_ways(self, peers: PeerAllReduce | None) -> SumWays:
        """The ways that add in the order of the ranks."""
        ways: dict[Way, Add] = {}
        most = {Way.GATHERED: GATHERED_BYTES}
        if peers is not None:
            ways |= {Way.ONE_SHOT: peers.one_shot, Way.TWO_SHOT: peers.two_shot}
            most[Way.ONE_SHOT] = peers.one_shot_bytes
        if self.size <= 2:
            ways[Way.NCCL] = self._nccl_sums.plain
        else:
            ways |= {Way.GATHERED: self._nccl_sums.gathered, Way.SLICED: self._nccl_sums.sliced}
        return SumWays(ways, most)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in rank order, in place."""
        dense = self._dense(tensor)
        if dense.numel():
            if dense.dtype.is_floating_point:
                self._ways.add(dense)
            else:
                self._nccl_sums.plain(dense)
        return tensor if dense is tensor else tensor.copy_(dense)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor`."""
        dense = self._dense(tensor)
        result = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        if dense.numel():
            pointer, count, kind = self._describe(dense)
            self._handle.allGather(pointer, result.data_ptr(), count, kind, self._stream())
        return result

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue sending a part to each rank; return a new tensor of what each rank sends to this one."""
        check_parts(self, tensor)
        dense = tensor.contiguous()
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if dense.numel():
            self._nccl_sums.all_to_all(dense, result)
        return result

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:
        """Enqueue sending to `root`; return a new [size, *tensor.shape] tensor there, None elsewhere."""
        check_root(self, root)
        dense = self._dense(tensor)
        pointer, count, kind = self._describe(dense)
        if self.rank != root:
            if count:
                self._handle.send(pointer, count, kind, root, self._stream())
            return None
        result = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        result[root].copy_(dense)
        if count:
            # As one group the messages come at the same time; one after the other, each would wait for the one before.
            self._nccl.groupStart()
            for source in range(self.size):
                if source != root:
                    self._handle.recv(result[source].data_ptr(), count, kind, source, self._stream())
            self._nccl.groupEnd()
        return result

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite `tensor` with rank `root`'s, in place."""
        check_root(self, root)
        dense = self._dense(tensor)
        if dense.numel():
            pointer, count, kind = self._describe(dense)
            self._handle.broadcast(pointer, pointer, count, kind, root, self._stream())
        return tensor if dense is tensor else tensor.copy_(dense)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Enqueue sending to `destination`."""
        check_peer(self, destination)
        dense = self._dense(tensor)
        if dense.numel():
            pointer, count, kind = self._describe(dense)
            self._handle.send(pointer, count, kind, destination, self._stream())

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Enqueue receiving from `source` into `tensor`."""
        check_peer(self, source)
        check_tensor(self, tensor)
        dense = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if dense.numel():
            pointer, count, kind = self._describe(dense)
            self._handle.recv(pointer, count, kind, source, self._stream())
        return tensor if dense is tensor else tensor.copy_(dense)

    def barrier(self) -> None:
        """Return when every rank has called and this rank's work on the device is finished."""
        torch.cuda.synchronize(self.device)
        self._comm.Barrier()

    def warm_up(self) -> None:
        """Use every operation once, with every peer; then measure how sums are made best."""
        use_every_operation(self)
        if self._sums_often and self.size > 1:
            beside = {Way.NCCL: self._nccl_sums.plain}
            self.sum_timings = self._ways.measure(self._comm, self.device, beside)
        if self._peers is not None and self._ways.choose(MEASURED_BYTES[0]) is Way.ONE_SHOT:
            self.peer_rows = self._peers.peer_rows  # which takes as long

    @override
    def abandon(self) -> None:
        """Abort NCCL's kernels, which end without their peer."""
        self._handle.abort()

    def close(self) -> None:
        """Wait for the device, then close the peers' memory, destroy the NCCL communicator and free the MPI one."""
        torch.cuda.synchronize(self.device)
        self.peer_rows = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._handle.destroy()
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or a contiguous copy of it."""
        check_tensor(self, tensor)
        return tensor.contiguous()

    def _describe(self, dense: torch.Tensor) -> tuple[int, int, int]:
        """Return pointer, element count and NCCL type of a contiguous tensor."""
        return dense.data_ptr(), dense.numel(), self._types[dense.dtype]

    def _stream(self) -> int:
        """Return torch's current stream as a raw handle; the caller's tensors belong to it, so no event is needed."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)
