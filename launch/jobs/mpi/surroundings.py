"""What a host must have for mpirun to start at all, and one line for each thing that it lacks.

mpirun's own words for these, where it has any, name its parts and not the cause. It knows folders and interfaces. It
does not know jobs: whoever has seen one fail asks.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

LEAST_TEMPORARY_BYTES = 16 << 20
"""mpirun maps files of some megabytes in its temporary folder; where they do not fit it is killed by SIGBUS."""


def find_home(environment: Mapping[str, str]) -> str:
    """The user's home folder, without which Open MPI does not start: HOME, the passwd entry's, or where there is
    neither the folder for temporary files."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return home if os.path.isabs(home) else tempfile.gettempdir()


def describe_lacks(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each thing that this host lacks for mpirun, and what to do about it.

    Args:
        environment: of mpirun.
    """
    folder = temporary_folder(environment)
    try:
        room = os.statvfs(folder)
    except OSError as error:
        yield f"the temporary folder {folder} cannot be used ({error.strerror}): name another one with TMPDIR"
    else:
        free = room.f_bavail * room.f_frsize
        if free < LEAST_TEMPORARY_BYTES or (room.f_files and not room.f_favail):
            what = f"{free / 1e6:.1f} MB" if free < LEAST_TEMPORARY_BYTES else "no inodes"
            yield (
                f"the temporary folder {folder} has {what} left, and mpirun needs some megabytes there: make room, or "
                "name another one with TMPDIR"
            )
    if not has_loopback():
        yield "this host has no loopback interface at 127.0.0.1, which mpirun and its ranks need: ip link set lo up"


def temporary_folder(environment: Mapping[str, str]) -> Path:
    """Where mpirun keeps what it needs while it runs."""
    return Path(next(filter(None, map(environment.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))


def has_loopback() -> bool:
    """Whether 127.0.0.1 can be reached; nothing is sent there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError:
            return False
    return True
