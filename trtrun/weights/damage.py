"""Why a file is no safetensors file that can be read: cut off, of another format, or with a header that is wrong.

What to do differs: a file that was cut off is copied again, a Git LFS pointer is fetched, a pickle is saved anew. It
looks at the first bytes only; nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from trtrun.configuration.hub_cache import fetch_again
from trtrun.errors import shorten

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""

_OTHER_FORMATS = (
    (b"version https://git-lfs", "it is a Git LFS pointer in place of the file: fetch the file with `git lfs pull`"),
    (b"PK\x03\x04", "it is a zip archive, as PyTorch writes pickles: save the model as safetensors"),
    (b"\x80\x02", "it is a pickle: save the model as safetensors"),
    (b"GGUF", "it is a GGUF file: take the model as safetensors"),
    (b"\x89HDF", "it is an HDF5 file: save the model as safetensors"),
)


def describe_damage(file: Path, error: Exception) -> str:
    """Say what is wrong with a file, and what to do, in a few words that go on behind its name.

    Args:
        file: that could not be opened.
        error: what the library said.
    """
    said = shorten(str(error).rpartition("deserializing header: ")[2], 200).strip("'\"")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(64)
            length = _LENGTH.unpack(start[:8])[0] if len(start) >= 8 else 0
            header = opened.read(0)
            if size >= 8 + length and length <= _MOST_HEADER_BYTES:
                opened.seek(8)
                header = opened.read(length)
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    way = fetch_again(file.parent, "copy it again")
    if size < 8:
        return f"is truncated ({size} bytes); {way}"
    for mark, remedy in _OTHER_FORMATS:
        if start.startswith(mark):
            return f"is no safetensors file: {remedy}"
    if start[8:9] not in (b"{", b"") or length > _MOST_HEADER_BYTES:
        return f"is no safetensors file ({said})"
    needed = 8 + length + _count_data(header)
    if size < needed:
        return f"is truncated ({size} bytes of {needed}); {way}"
    return f"has a header that is wrong ({said}): {way}, or save the model anew"


def _count_data(header: bytes) -> int:
    """Bytes of tensors that a header speaks of; 0 where it cannot be read."""
    try:
        entries = json.loads(header)
        return max(int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return 0
