"""Sums over the GPUs of one host that reach each other's memory, by kernels of its own, in the order of the ranks.

Two kernels (`peer_all_reduce.cu`), compiled by CuPy's NVRTC at first use and kept by CuPy on disk:

- one_shot, for small messages: every rank sends its whole message to all others and sums all of them.
- two_shot, for messages of any size: rank r sums slice r of each piece and sends the sums to all others.

Both begin while the kernel before them ends, and let the next one begin: programmatic dependent launch, of compute
capability 9.0 on (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). Both only enqueue.
What tells calls apart is counted on the device, so that a CUDA graph may hold them and be replayed any number of times
between other calls. Multicast (NVLink SHARP) is not used: it adds up in an order of its own.

It knows addresses, bytes and ranks. It does not know which kernel is better for a size.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from parallel.communicator import PeerRows
from parallel.errors import CommunicatorError
from parallel.transports.peer_memory import PeerMemory

MOST_RANKS = 8
ALIGNMENT = 16
"""Bytes of the vectors that the kernels read and write."""

THREADS = 512
BLOCKS = 64
_SLOTS = 4
_GROUP_BYTES = 8
_ARRIVAL_BYTES = 16  # a group of 8 bytes with its marks
_PART_BYTES = 4 << 20  # of each of the arrivals, the inbox and the outbox, at most
_LEAST_CHUNK = 1024
_ROW_WORDS = 4096  # of four bytes, in the longest row that others sum: 8,192 numbers of half precision
_WORD_BYTES = 8  # with its mark
_ROW_CALLS = 8 * BLOCKS
_FLAGS = 4096
_ARRIVALS = 16384
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Layout:
    """Where the parts of a rank's buffer are, and how messages are divided among blocks.

    Attributes:
        ranks: of the group, 2 to MOST_RANKS.
        groups: of 8 bytes, in the largest message of one_shot.
        chunk: bytes of a slice that a block of two_shot works on at a time, at most.
        inbox, outbox: offsets in bytes.
        rows: that kernels of others sum in a call, at most (see PeerRows).
        row_places: offset in bytes of their places.
        nbytes: of the whole buffer.
    """

    ranks: int
    groups: int
    chunk: int
    inbox: int
    outbox: int
    rows: int
    row_places: int
    nbytes: int

    @classmethod
    def of(cls, ranks: int) -> Layout:
        """The layout for a group of so many ranks: about 16 MiB for any."""
        groups = min(_PART_BYTES // (_SLOTS * ranks * _ARRIVAL_BYTES) // THREADS, BLOCKS) * THREADS
        chunk = _PART_BYTES // (BLOCKS * ranks) // _LEAST_CHUNK * _LEAST_CHUNK
        inbox = _ARRIVALS + _SLOTS * ranks * groups * _ARRIVAL_BYTES
        part = BLOCKS * ranks * chunk
        row_bytes = _SLOTS * ranks * _ROW_WORDS * _WORD_BYTES
        rows, row_places = _PART_BYTES // row_bytes, inbox + 2 * part
        return cls(ranks, groups, chunk, inbox, inbox + part, rows, row_places, row_places + rows * row_bytes)

    @property
    def one_shot_bytes(self) -> int:
        """The largest message of one_shot."""
        return self.groups * _GROUP_BYTES

    def one_shot_blocks(self, nbytes: int) -> int:
        """Blocks for a message: each has its own share of the buffer, so that a byte's block is always the same."""
        return -(-nbytes // (THREADS * _GROUP_BYTES))

    def two_shot_shape(self, nbytes: int) -> tuple[int, int]:
        """Blocks, and bytes of a slice in each turn of a block: the turns as few and as equal as can be."""
        blocks = min(BLOCKS, -(-nbytes // (self.ranks * _LEAST_CHUNK)))
        slices = self.ranks * blocks
        turns = -(-nbytes // (slices * self.chunk))
        share = -(-nbytes // (slices * turns))
        return blocks, -(-share // ALIGNMENT) * ALIGNMENT

    def peer_rows(self, rank: int, addresses: Sequence[int]) -> PeerRows:
        """Where kernels of others sum rows.

        Args:
            rank: this rank's place in the group.
            addresses: of the buffers, beginning with this rank's and going on with the next one's.
        """
        own, *others = (address + self.row_places for address in addresses)
        calls = addresses[0] + _ROW_CALLS
        return PeerRows(rank, self.ranks, self.rows, _ROW_WORDS, _SLOTS, calls, own, tuple(others))

    def definitions(self) -> dict[str, int]:
        """What the kernels' source wants to be told."""
        return {
            "RANKS": self.ranks,
            "THREADS": THREADS,
            "SLOTS": _SLOTS,
            "GROUPS": self.groups,
            "CHUNK": self.chunk,
            "ONE_SHOT_CALLS": 0,
            "TWO_SHOT_CALLS": 4 * BLOCKS,
            "FLAGS": _FLAGS,
            "ARRIVALS": _ARRIVALS,
            "INBOX": self.inbox,
            "OUTBOX": self.outbox,
        }


@cache
def kernel_source() -> str:
    """The CUDA C++ of the kernels."""
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


class PeerAllReduce:
    """The kernels of one group, on one rank."""

    def __init__(
        self, memory: PeerMemory, layout: Layout, rank: int, device: torch.device, first_call: int = 0
    ) -> None:
        """Compile the kernels.

        Args:
            memory: the group's buffers, of `layout.nbytes`, all zero; the caller closes it.
            layout: of the buffers.
            rank: this rank's place in the group.
            device: this rank's.
            first_call: the number of the first call, the same on all ranks. Numbers wrap.
        """
        self._layout = layout
        self._rank = rank
        self._device = device
        self._module, self._kernels = _compile(layout, device)
        self._driver: Any = importlib.import_module("cupy.cuda").driver
        self._begins_early = begins_early(device)
        self._addresses = (memory.own, *memory.others, *(0,) * (MOST_RANKS - layout.ranks))
        if first_call:
            numbers = torch.full((2 * BLOCKS + layout.rows,), first_call, dtype=torch.int64).to(torch.int32)
            memory.write(numbers)

    @property
    def one_shot_bytes(self) -> int:
        """The largest message of one_shot."""
        return self._layout.one_shot_bytes

    @property
    def peer_rows(self) -> PeerRows:
        """Where kernels of others sum rows, whose calls are counted apart from those here."""
        return self._layout.peer_rows(self._rank, self._addresses[: self._layout.ranks])

    def one_shot(self, message: torch.Tensor) -> None:
        """Enqueue the sum of a small message, in place.

        Args:
            message: contiguous, not empty, float32, float16 or bfloat16, of `one_shot_bytes` at most; the same shape
                and dtype on all ranks.
        """
        blocks = self._layout.one_shot_blocks(_count_bytes(message))
        self._enqueue("one_shot", message, blocks, (self._rank,))

    def two_shot(self, message: torch.Tensor) -> None:
        """Enqueue the sum of a message of any size, in place; the rest is as in `one_shot`."""
        blocks, chunk = self._layout.two_shot_shape(_count_bytes(message))
        self._enqueue("two_shot", message, blocks, (chunk, self._rank))

    def _enqueue(self, name: str, message: torch.Tensor, blocks: int, arguments: tuple[int, ...]) -> None:
        """Enqueue a kernel for a message at any address; where no vector begins there, for a copy of it."""
        if message.data_ptr() % ALIGNMENT == 0:
            self._launch(name, message, blocks, arguments)
        else:
            copy = message.clone()
            self._launch(name, copy, blocks, arguments)
            message.copy_(copy)

    def _launch(self, name: str, message: torch.Tensor, blocks: int, arguments: tuple[int, ...]) -> None:
        """Enqueue a kernel on torch's current stream; the driver copies the arguments."""
        values = (message.data_ptr(), _count_bytes(message), *arguments, *self._addresses)
        array = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(array)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        kernel = self._kernels[name, message.dtype]
        with torch.cuda.device(self._device):  # the driver wants its context to be the current one
            stream = torch.cuda.current_stream(self._device).cuda_stream
            if self._begins_early:
                launch_early(kernel, blocks, THREADS, stream, ctypes.addressof(places))
            else:
                self._driver.launchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(places), 0)


def _count_bytes(message: torch.Tensor) -> int:
    return message.numel() * message.element_size()


def _compile(layout: Layout, device: torch.device) -> tuple[Any, dict[tuple[str, torch.dtype], int]]:
    """The module, which is to be kept as long as its kernels, and the kernels' handles."""
    cupy: Any = importlib.import_module("cupy")
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in layout.definitions().items()))
    with torch.cuda.device(device), cupy.cuda.Device(torch.cuda.current_device()):
        module = cupy.RawModule(code=kernel_source(), options=options)
        kernels = {
            (kind, dtype): module.get_function(f"{kind}_{name}").kernel
            for kind in ("one_shot", "two_shot")
            for dtype, name in _NAMES.items()
        }
    return (module, kernels), {key: int(kernel.ptr) for key, kernel in kernels.items()}


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; its value is a union of 64 bytes, which begins with the number."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def begins_early(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def launch_early(kernel: int, blocks: int, threads: int, stream: int, arguments: int) -> None:
    """Enqueue a kernel in the current context, so that it begins while the one before it ends. What it does to wait for
    all before it is its own: see `begin` in peer_all_reduce.cu. CuPy's driver has no word for such a launch, so CUDA's
    own library is called.

    Args:
        kernel: its handle.
        blocks, threads: of the grid, and of a block, in one dimension.
        stream: handle of the stream.
        arguments: address of an array of pointers to the arguments, which are copied.

    Raises:
        CommunicatorError: the driver refuses.
    """
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    one = (ctypes.c_uint * 3)(1, 1, 1)
    config = _Config(one, one, 0, stream, ctypes.pointer(attribute), 1)
    config.grid[0], config.block[0] = blocks, threads
    status = _library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(kernel), ctypes.c_void_p(arguments), ctypes.c_void_p(0)
    )
    if status:
        raise CommunicatorError(f"CUDA's driver refuses to launch a sum over the ranks: error {status}")
