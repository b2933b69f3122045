"""Reading files straight to where their bytes belong.

For a GPU threads read pieces into pinned memory and copy them from there, side by side, because one thread reads more
slowly than memory and the link to the GPU allow.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from trtrun.linear.quantization.base import TensorSpec
from trtrun.threads import count_cores


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_piece(file: int, destination: memoryview, offset: int) -> None:
    """Fill `destination` from an open file.

    Raises:
        OSError: the file ends before, or cannot be read.
    """
    done = 0
    while done < len(destination):
        count = os.preadv(file, [destination[done:]], offset + done)
        if not count:
            raise OSError(f"it ends at byte {offset + done}")
        done += count


PIECE_BYTES = 8 << 20
_MOST_THREADS = 8
_WAIT_SECONDS = 0.2


class _Part(NamedTuple):
    """Bytes of a piece: of which tensor, the first in the piece, the first in the tensor, and how many."""

    name: str
    first: int
    at: int
    size: int


class _Piece(NamedTuple):
    """Bytes of the file, and whose they are."""

    offset: int
    size: int
    parts: list[_Part]


class DeviceReading:
    """Reads all of a file's tensors, from now on.

    Args:
        file: that is read.
        device: a GPU, where all tensors are made at once.
        wanted: by name: first byte in the file, and what it is; in the file's order.
        num_threads: that read; None for what the host has cores for.

    Attributes:
        arrived: bytes that are there so far.
    """

    def __init__(
        self,
        file: Path,
        device: torch.device,
        wanted: Mapping[str, tuple[int, TensorSpec]],
        num_threads: int | None = None,
    ) -> None:
        self._file, self._device = file, device
        self._tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, (_, spec) in wanted.items()
        }
        self._places = {name: tensor.view(-1).view(torch.uint8) for name, tensor in self._tensors.items()}
        pieces = list(cut_pieces({name: (start, spec.num_bytes) for name, (start, spec) in wanted.items()}))
        self._pieces = deque(pieces)
        self._left = dict.fromkeys(wanted, 0)
        for piece in pieces:
            for part in piece.parts:
                self._left[part.name] += 1
        self.arrived = 0
        self._changed = threading.Condition()
        self._problem: BaseException | None = None
        if device.type == "cuda":
            # Memory that was freed before may still be computed with; other streams write to it from here on.
            torch.cuda.current_stream(device).synchronize()
        count = num_threads or max(1, min(_MOST_THREADS, count_cores() // 2))
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-{index}", daemon=True)
            for index in range(min(count, len(pieces)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, name: str, on_wait: Callable[[int], None] = lambda arrived: None) -> torch.Tensor | None:
        """A tensor, once it is there; None where it was taken before.

        Args:
            name: of the tensor.
            on_wait: called now and then meanwhile, with bytes of all tensors that have arrived.

        Raises:
            OSError: the file cannot be read.
        """
        if name not in self._tensors:
            return None
        with self._changed:
            while not self._changed.wait_for(lambda: self._problem is not None or not self._left[name], _WAIT_SECONDS):
                on_wait(self.arrived)
            if self._problem is not None:
                raise self._problem
        return self._tensors.pop(name)

    def close(self) -> None:
        """Let threads end, and forget tensors that nobody took."""
        self._pieces.clear()
        for thread in self._threads:
            thread.join()
        self._tensors.clear()
        self._places.clear()

    @torch.inference_mode()
    def _run(self) -> None:
        """One thread; whatever mode tensors were made in."""
        try:
            file = os.open(self._file, os.O_RDONLY)
            try:
                if self._device.type == "cuda":
                    self._read_pinned(file)
                else:
                    self._read(file, torch.empty(PIECE_BYTES, dtype=torch.uint8), None)
            finally:
                os.close(file)
        except BaseException as problem:
            with self._changed:
                self._problem = problem
                self._changed.notify_all()

    def _read_pinned(self, file: int) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._read(file, torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), stream)

    def _read(self, file: int, buffer: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        view = bytes_of(buffer)
        while self._problem is None:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            read_piece(file, view[: piece.size], piece.offset)
            for name, first, at, size in piece.parts:
                self._places[name][at : at + size].copy_(buffer[first : first + size], non_blocking=True)
            if stream is not None:
                stream.synchronize()
            with self._changed:
                for part in piece.parts:
                    self._left[part.name] -= 1
                self.arrived += piece.size
                self._changed.notify_all()


def cut_pieces(wanted: Mapping[str, tuple[int, int]]) -> Iterator[_Piece]:
    """Pieces of at most PIECE_BYTES, which neighbours in the file share.

    Args:
        wanted: by name: first byte in the file, and how many; in the file's order.
    """
    offset, parts = 0, list[_Part]()
    filled = 0
    for name, (start, size) in wanted.items():
        at = 0
        while at < size:
            if parts and (start + at != offset + filled or filled == PIECE_BYTES):
                yield _Piece(offset, filled, parts)
                parts, filled = [], 0
            if not parts:
                offset = start + at
            more = min(size - at, PIECE_BYTES - filled)
            parts.append(_Part(name, filled, at, more))
            at, filled = at + more, filled + more
    if parts:
        yield _Piece(offset, filled, parts)
