"""NCCL transport: CUDA tensors, device to device, on torch's current stream.

CuPy brings the binding; it is imported when the first communicator is made, so that this module imports on machines
without CUDA. Calls enqueue and return: nothing here waits on the host, and the calls can be captured in a CUDA graph.
NCCL sums half types with its own intermediate rounding and in an order of its own, the same on all ranks.

It knows raw pointers and ranks; it knows no role and no model. MPI carries only the 128 bytes of the unique id.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from mpi4py import MPI

from parallel.communicator import check_peer, check_root, check_tensor, use_every_operation
from parallel.errors import CommunicatorError

UNIQUE_ID_BYTES = 128
CONSTANTS = {
    torch.float32: "NCCL_FLOAT32",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.uint8: "NCCL_UINT8",
    torch.bool: "NCCL_UINT8",  # NCCL has no bool: a byte of 0 or 1
}


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


class NcclCommunicator:
    """A Communicator over NCCL; see the protocol for shapes and errors."""

    is_capturable = True

    def __init__(self, comm: MPI.Intracomm, name: str, device: torch.device) -> None:
        """Make the NCCL communicator of the ranks of `comm`. Collective.

        Args:
            comm: an MPI communicator made for this group alone; `close` frees it.
            name: for messages.
            device: this rank's CUDA device; no other rank of the group uses it.

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

    def _connect(self, unique_id: bytes) -> Any:
        """Make CuPy's communicator. Collective."""
        try:
            return self._nccl.NcclCommunicator(self.size, unique_id, self.rank)
        except TypeError:  # before CuPy 14 the id was a tuple of signed chars
            signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
            return self._nccl.NcclCommunicator(self.size, signed, self.rank)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        dense = self._dense(tensor)
        if dense.numel():
            operation = self._nccl.NCCL_MAX if dense.dtype == torch.bool else self._nccl.NCCL_SUM
            pointer, count, kind = self._describe(dense)
            self._handle.allReduce(pointer, pointer, count, kind, operation, self._stream())
        return tensor if dense is tensor else tensor.copy_(dense)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new [size, *tensor.shape] tensor of every rank's `tensor`."""
        dense = self._dense(tensor)
        result = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        if dense.numel():
            pointer, count, kind = self._describe(dense)
            self._handle.allGather(pointer, result.data_ptr(), count, kind, self._stream())
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
        """Use every operation once, with every peer."""
        use_every_operation(self)

    def close(self) -> None:
        """Wait for the device, then destroy the NCCL communicator and free the MPI one."""
        torch.cuda.synchronize(self.device)
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
