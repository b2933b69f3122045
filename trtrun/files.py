"""Files on disk: bytes that are written whole, files that are replaced whole, lines of bounded length."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

_FOREIGN_STARTS = {
    b"\x1f\x8b": "is compressed (gzip): unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd): unpack it first",
    b"\xfd7zXZ\x00": "is compressed (xz): unpack it first",
    b"BZh": "is compressed (bzip2): unpack it first",
    b"PK\x03\x04": "is compressed (zip): unpack it first",
    b"\xff\xfe": "is UTF-16 text: write it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: write it as UTF-8",
}


def describe_foreign(start: bytes) -> str | None:
    """What a file is that cannot be read as lines of UTF-8, and what to do, by its first bytes; None where it can."""
    return next((told for foreign, told in _FOREIGN_STARTS.items() if start.startswith(foreign)), None)


def write_all(file: int, data: bytes) -> None:
    """Write bytes to an open file: one write, unless the system takes less than all.

    Raises:
        OSError: they cannot be written; some of them may be there.
    """
    while data:
        data = data[os.write(file, data) :]


def put_in_place(temporary: Path, path: Path) -> None:
    """Put a file in the place of another, and on the disk before that.

    Raises:
        OSError: it cannot be.
    """
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def replace_file(path: Path, temporary: Path, lines: Iterable[bytes], mode: int = 0o666) -> None:
    """Make `path` of these lines in one step: at any moment it is the old file or the new one, as a whole.

    Args:
        path: of the file.
        temporary: where it is written first.
        lines: with their ends.
        mode: of a new file, from which the process's umask is taken.

    Raises:
        OSError: it cannot be written; the old file is as it was, and `temporary` is gone: a full disk needs its room.
    """
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines(lines)
        put_in_place(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_lines(file: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of a file, each with its end; of one that is longer than `most_bytes` its beginning, longer than that
    by one byte."""
    while line := file.readline(most_bytes + 1):
        yield line
        while len(line) > most_bytes and not line.endswith(b"\n"):
            line = file.readline(most_bytes + 1)  # the rest of it, piece by piece
