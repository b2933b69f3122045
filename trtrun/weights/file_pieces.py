"""Pieces of a file, read straight to where they belong. It knows bytes."""

from __future__ import annotations

import os

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_piece(file: int, place: memoryview, offset: int) -> None:
    """Fill `place` from an open file.

    Raises:
        OSError: the file ends before, or cannot be read.
    """
    done = 0
    while done < len(place):
        count = os.preadv(file, [place[done:]], offset + done)
        if not count:
            raise OSError(f"it ends at byte {offset + done}")
        done += count
