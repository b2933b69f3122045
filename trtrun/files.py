"""Files on disk: bytes that are written whole, files that are replaced whole, lines of bounded length."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO


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
