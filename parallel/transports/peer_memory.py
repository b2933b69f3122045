"""A buffer of GPU memory on every rank of a group, open to all other ranks of it: CUDA IPC between processes.

Handles travel over MPI. It knows addresses and bytes; it does not know what the buffers are for.
"""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from parallel.mpi_rank import all_gather_json

if TYPE_CHECKING:
    from mpi4py import MPI

SEAL_BYTES = 8
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


@dataclass
class PeerMemory:
    """This rank's buffer, and the others' as this process sees them.

    Attributes:
        nbytes: of each buffer; all zero when it is opened.
        own: address of this rank's.
        others: addresses of the others', beginning with the next rank's and ending with the one before.
    """

    nbytes: int
    own: int
    others: tuple[int, ...]
    _comm: MPI.Intracomm = field(repr=False)
    _device: torch.device

    def write(self, values: torch.Tensor) -> None:
        """Write a contiguous host tensor to the beginning of this rank's buffer. For what no rank writes to as yet."""
        with torch.cuda.device(self._device):
            _runtime().memcpy(self.own, values.data_ptr(), values.numel() * values.element_size(), _TO_DEVICE)
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give the memory back once no rank uses it any more. Collective."""
        runtime = _runtime()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            self._comm.Barrier()  # nobody writes into this rank's buffer any more
            for address in self.others:
                runtime.ipcCloseMemHandle(address)
            self._comm.Barrier()  # and nobody has it open: to free it before would be undefined
            if self.own:
                runtime.free(self.own)
        self.own, self.others = 0, ()


def open_peer_memory(comm: MPI.Intracomm, device: torch.device, nbytes: int) -> PeerMemory | None:
    """Open a buffer on every rank. Collective over `comm`, with the same answer on all ranks.

    Args:
        comm: the group's ranks.
        device: this rank's CUDA device.
        nbytes: of each buffer, SEAL_BYTES a rank at least.

    Returns:
        None where the ranks are not on one host, share a GPU, have GPUs that do not reach each other, or where the
        system does not let processes open each other's memory.
    """
    with torch.cuda.device(device):
        if not _reach_each_other(comm, device):
            return None
        memory = _open_all(comm, device, nbytes)
        # A system may say that GPUs reach each other and yet lose what is written.
        if memory is not None and not _passes_seals(comm, memory):
            memory.close()
            return None
        return memory


def _runtime() -> Any:
    return importlib.import_module("cupy.cuda").runtime


def _reach_each_other(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Whether every rank's GPU reaches every other's: the same answer on all ranks."""
    runtime, index = _runtime(), torch.cuda.current_device()
    places = all_gather_json(comm, [socket.gethostname(), str(runtime.deviceGetPCIBusId(index))])
    host, bus = places[comm.Get_rank()]
    distinct = len({place[1] for place in places}) == len(places)
    reached = distinct and all(
        there == host and (other == bus or _reaches(runtime, index, other)) for there, other in places
    )
    return all(all_gather_json(comm, reached))


def _reaches(runtime: Any, index: int, bus: str) -> bool:
    """Whether device `index` reaches the device with this PCI bus id, which this process may be unable to see."""
    try:
        return bool(runtime.deviceCanAccessPeer(index, runtime.deviceGetByPCIBusId(bus)))
    except runtime.CUDARuntimeError:
        return False


def _open_all(comm: MPI.Intracomm, device: torch.device, nbytes: int) -> PeerMemory | None:
    """Allocate a buffer and open the others'; None on all ranks where one cannot."""
    runtime, rank, size = _runtime(), comm.Get_rank(), comm.Get_size()
    own, handle = 0, ""
    try:
        # Plain cudaMalloc: what torch's allocator gives may be a part of something larger, or cannot be exported.
        own = runtime.malloc(nbytes)
        runtime.memset(own, 0, nbytes)
        torch.cuda.synchronize(device)
        handle = bytes(runtime.ipcGetMemHandle(own)).hex()
    except runtime.CUDARuntimeError:
        pass
    handles = all_gather_json(comm, handle)
    others: list[int] = []
    try:
        if all(handles):
            for step in range(1, size):
                others.append(runtime.ipcOpenMemHandle(bytes.fromhex(handles[(rank + step) % size])))
    except runtime.CUDARuntimeError:
        pass
    memory = PeerMemory(nbytes, own, tuple(others), comm, device)
    if all(all_gather_json(comm, len(others) == size - 1)):
        return memory
    memory.close()
    return None


def _passes_seals(comm: MPI.Intracomm, memory: PeerMemory) -> bool:
    """Whether what each rank writes into the others' buffers arrives; leaves the buffers zero."""
    runtime, rank, size = _runtime(), comm.Get_rank(), comm.Get_size()
    seal = torch.tensor([(rank + 1) * 0x0101010101010101 % 2**63], dtype=torch.int64)
    for address in (memory.own, *memory.others):
        runtime.memcpy(address + SEAL_BYTES * rank, seal.data_ptr(), SEAL_BYTES, _TO_DEVICE)
    torch.cuda.synchronize()
    comm.Barrier()
    found = torch.empty(size, dtype=torch.int64)
    runtime.memcpy(found.data_ptr(), memory.own, SEAL_BYTES * size, _TO_HOST)
    due = [(other + 1) * 0x0101010101010101 % 2**63 for other in range(size)]
    comm.Barrier()
    runtime.memset(memory.own, 0, SEAL_BYTES * size)
    torch.cuda.synchronize()
    return all(all_gather_json(comm, found.tolist() == due))
