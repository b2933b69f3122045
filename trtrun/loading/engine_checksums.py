"""Checksums of the tensors of an engine's shards: taken when they are built, and compared when they load.

A position-weighted sum of 64-bit words, as Fletcher's (1982) is, modulo 2^64: whatever changes within one word is found
for certain, and everything else but for chance. Unlike CRCs and hashes it is as fast as memory on GPUs, too, where
weights are when they have been read: so every start compares, and not a command alone. It is no proof against somebody
who means to deceive. It knows tensors and files. It does not know layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trtrun.configuration.engine_directory import EngineDescription
from trtrun.errors import CheckpointError, shorten_path, wrap_errors
from trtrun.loading.device_reading import bytes_of, read_piece
from trtrun.loading.engine_shards import read_places, shard_path

_ROW_WORDS = 512
_ROW_BYTES = 8 * _ROW_WORDS
_COLUMN_FACTOR = 0x3C6EF372FE94F82A
"""Even, so that every word's weight, (2 row + 1) + (2 column + 1) × factor, is odd: a factor that loses no bit."""

_PIECE_BYTES = 1 << 20
"""On the host: what was read, or passed over once, is in the cache still. A multiple of a row."""


def sum_words(tensor: Tensor, first_row: int = 0) -> Tensor:
    """The weighted sum of a tensor's bytes, in rows of 4 KiB; the last one is filled up with zeros.

    Args:
        tensor: contiguous, of any dtype, on any device.
        first_row: its first byte's row, where it is a piece of a whole: sums of pieces add up to the whole's.

    Returns:
        [] int64 on its device, which is not waited for.
    """
    data = tensor.view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    step = max(_ROW_BYTES, data.numel()) if data.is_cuda else _PIECE_BYTES
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), step):
        piece = data[start : start + step]
        whole = piece.numel() // _ROW_BYTES * _ROW_BYTES
        row = first_row + start // _ROW_BYTES
        if whole:
            total += _sum_rows(piece[:whole], row)
        if whole < piece.numel():
            filled = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=data.device)
            filled[: piece.numel() - whole] = piece[whole:]
            total += _sum_rows(filled, row + whole // _ROW_BYTES)
    return total


def _sum_rows(data: Tensor, first_row: int) -> Tensor:
    words = data.view(torch.int64).view(-1, _ROW_WORDS)
    rows = torch.arange(first_row, first_row + len(words), device=data.device) * 2 + 1
    columns = (torch.arange(_ROW_WORDS, device=data.device) * 2 + 1) * _COLUMN_FACTOR
    return (words.sum(1) * rows).sum() + (words.sum(0) * columns).sum()


def read_summed(
    destination: Tensor, file: int, start: int, first_row: int = 0, read: Callable[[int], None] = lambda num_bytes: None
) -> Tensor:
    """Fill a tensor from a file; returns `sum_words` of it.

    Args:
        destination: contiguous, on the host.
        file: open.
        start: first byte there.
        first_row: see `sum_words`.
        read: called with the bytes of each piece.

    Raises:
        OSError: the file ends before, or cannot be read.
    """
    data, total = destination.view(-1).view(torch.uint8), torch.zeros((), dtype=torch.int64)
    for first in range(0, data.numel(), _PIECE_BYTES):
        piece = data[first : first + _PIECE_BYTES]
        read_piece(file, bytes_of(piece), start + first)
        total += sum_words(piece, first_row + first // _ROW_BYTES)
        read(piece.numel())
    return total


def checksum_text(total: int) -> str:
    """A sum as engine.json has it: 16 hexadecimal digits."""
    return f"{total % 2**64:016x}"


class ShardComparison:
    """Compares the tensors of a shard with what was built, as they come.

    Args:
        path: of the engine.
        engine: what it says of itself.
        rank: whose shard it is.
    """

    def __init__(self, path: Path, engine: EngineDescription, rank: int) -> None:
        self._file = shard_path(path, engine, rank)
        self._built = engine.shards[rank].checksums
        self._sums: list[tuple[str, Tensor]] = []

    def add(self, name: str, total: Tensor) -> None:
        """A tensor's sum, as `sum_words` gives it; on a GPU nothing is waited for."""
        self._sums.append((name, total))

    def compare(self) -> None:
        """Compare all that were added since the last call; on a GPU they are waited for.

        Raises:
            CheckpointError: one holds other bytes than were built.
        """
        sums, self._sums = self._sums, []
        found = torch.stack([total for _, total in sums]).tolist() if sums else []
        for (name, _), total in zip(sums, found, strict=True):
            if checksum_text(total) != self._built.get(name):
                raise CheckpointError(
                    f"{shorten_path(self._file)} is damaged: '{name}' holds other bytes than were built: copy the "
                    "engine again, or build it again"
                )


def compare_shard(path: Path, engine: EngineDescription, rank: int) -> int:
    """Read a whole shard, and compare all of its tensors; returns their bytes.

    Args:
        path: of the engine.
        engine: what it says of itself.
        rank: whose shard.

    Raises:
        CheckpointError: it is not the one that was built, or is damaged; one line with its file and tensor.
    """
    comparison = ShardComparison(path, engine, rank)
    file, places = shard_path(path, engine, rank), read_places(path, engine, rank)
    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
    with wrap_errors(file, CheckpointError), file.open("rb") as opened:
        for name, place in places.items():
            total = torch.zeros((), dtype=torch.int64)
            for first in range(0, place.num_bytes, _PIECE_BYTES):
                piece = buffer[: place.num_bytes - first]
                total += read_summed(piece, opened.fileno(), place.start + first, first // _ROW_BYTES)
            comparison.add(name, total)
            comparison.compare()
    return sum(place.num_bytes for place in places.values())
