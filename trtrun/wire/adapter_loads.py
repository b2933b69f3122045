"""The byte layout of what rank 0 asks of engine ranks when an adapter is to be loaded while they serve, and of answers.

It goes the way of plans, between two of them. A plan begins with its round, 0 or more; this with a number below those
of traces (timing/tracing.py). It knows bytes. It does not know who loads.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_KIND = -16
_HEAD = struct.Struct("=qq")


def encode_load(slot: int, path: Path) -> bytes:
    """Fill a slot from a directory."""
    return _HEAD.pack(_KIND, slot) + os.fsencode(path)


def decode_load(message: bytes) -> tuple[int, Path] | None:
    """The slot and the directory; None where the message is something else."""
    if len(message) < _HEAD.size:
        return None
    kind, slot = _HEAD.unpack_from(message)
    return (slot, Path(os.fsdecode(message[_HEAD.size :]))) if kind == _KIND else None
