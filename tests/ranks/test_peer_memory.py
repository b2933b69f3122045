"""Opening each other's memory, over a stand-in for CUDA's runtime: a GPU's memory is a file that processes map."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from parallel.transports import peer_memory
from parallel.transports.peer_memory import PeerMemory, open_peer_memory

pytestmark = pytest.mark.mpi(min_size=2)

NBYTES = 4096
DEVICE = torch.device("cuda", 0)


class FakeRuntime:
    """The calls of cupy.cuda.runtime that are used, with a device of its own for each rank.

    Attributes:
        mapped: addresses of memory that this process holds, its own and others'.
        loses_writes: whether what is written into another's memory is lost.
    """

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, rank: int, folder: Path) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self.loses_writes = False
        self._rank, self._folder = rank, folder
        self._own = 0

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), NBYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mapped[address] = mapping
        return address

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"bus {self._rank}"

    def deviceGetByPCIBusId(self, bus: str) -> int:
        return int(bus.split()[1])

    def deviceCanAccessPeer(self, device: int, other: int) -> int:
        return 1

    def malloc(self, nbytes: int) -> int:
        assert nbytes == NBYTES
        path = self._folder / str(self._rank)
        path.write_bytes(b"\xff" * nbytes)
        self._own = self._map(path)
        return self._own

    def free(self, address: int) -> None:
        assert address == self._own
        del self.mapped[address]

    def ipcGetMemHandle(self, address: int) -> bytes:
        assert address == self._own
        return str(self._folder / str(self._rank)).encode()

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        return self._map(Path(handle.decode()))

    def ipcCloseMemHandle(self, address: int) -> None:
        assert address != self._own
        del self.mapped[address]

    def memset(self, address: int, value: int, nbytes: int) -> None:
        ctypes.memset(address, value, nbytes)

    def memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        is_another = not any(0 <= target - base < NBYTES for base in (self._own,)) and kind == 1
        if not (is_another and self.loses_writes):
            ctypes.memmove(target, source, nbytes)


@pytest.fixture
def runtime(world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRuntime]:
    folder = Path(world.bcast(str(tmp_path)))
    fake = FakeRuntime(world.rank, folder)
    monkeypatch.setattr(peer_memory, "_runtime", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: world.rank)
    yield fake
    assert not fake.mapped, "memory was not given back"
    world.Barrier()  # rank 0's folder goes


def bytes_at(address: int) -> bytes:
    return ctypes.string_at(address, NBYTES)


def test_every_rank_writes_into_every_other(world: MPI.Intracomm, runtime: FakeRuntime) -> None:
    memory = open_peer_memory(world, DEVICE, NBYTES)
    assert isinstance(memory, PeerMemory)
    assert bytes_at(memory.own) == bytes(NBYTES)
    assert len(memory.others) == world.size - 1
    world.Barrier()
    for step, address in enumerate(memory.others, start=1):
        # Each rank has a place in each buffer: who wrote, and for whom.
        ctypes.memmove(address + 2 * world.rank, bytes([world.rank + 1, (world.rank + step) % world.size + 1]), 2)
    world.Barrier()
    for other in range(world.size):
        due = bytes(2) if other == world.rank else bytes([other + 1, world.rank + 1])
        assert bytes_at(memory.own)[2 * other : 2 * other + 2] == due
    memory.close()
    memory.close()  # nothing more to give back


def fail(*_: object) -> None:
    raise FakeRuntime.CUDARuntimeError("no")


def same_bus(device: int) -> str:
    return "bus 0"


def no_access(device: int, other: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("call", "replacement"),
    [
        ("malloc", fail),
        ("ipcGetMemHandle", fail),
        ("ipcOpenMemHandle", fail),
        ("deviceGetByPCIBusId", fail),
        ("deviceCanAccessPeer", no_access),
        ("deviceGetPCIBusId", same_bus),
    ],
)
def test_where_one_rank_cannot_none_does(
    world: MPI.Intracomm, runtime: FakeRuntime, call: str, replacement: Callable[..., object]
) -> None:
    if world.rank == world.size - 1:
        setattr(runtime, call, replacement)
    assert open_peer_memory(world, DEVICE, NBYTES) is None


def test_memory_that_loses_what_is_written_is_not_used(world: MPI.Intracomm, runtime: FakeRuntime) -> None:
    runtime.loses_writes = world.rank == 0
    assert open_peer_memory(world, DEVICE, NBYTES) is None


def test_ranks_of_several_hosts_do_not_try(
    world: MPI.Intracomm, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory.socket, "gethostname", lambda: f"host{world.rank == 0}")
    assert open_peer_memory(world, DEVICE, NBYTES) is None
    assert not os.path.exists(runtime._folder / "0")
