"""Lines of a batch as they are done: appended one by one, and read again by a server that is started again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from trtrun.files import write_all


class LineFile:
    """The lines of a batch that are done, of one kind. A line is one write: it outlives this process, not the host."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._path = path
        self._end = 0

    def read_ids(self) -> list[str]:
        """The custom_id of each line; what follows the last whole one is cut off, as a kill leaves half a line, and a
        host that goes down bytes that nobody wrote.

        Raises:
            OSError: it cannot be read.
        """
        found = []
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    found.append(_CUSTOM_ID.decode(line).custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                self._end += len(line)
        os.ftruncate(self._file, self._end)
        return found

    def write(self, line: bytes) -> None:
        """Append a line; as a whole, or not at all.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        try:
            write_all(self._file, line)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Close it."""
        os.close(self._file)


class _Line(msgspec.Struct):
    custom_id: str


_CUSTOM_ID = msgspec.json.Decoder(_Line)
