"""A folder of its own for the shared memory of a job's ranks, which goes with the job.

Ranks of one host exchange messages through files in /dev/shm. A rank that is killed leaves its file there, in memory,
and nothing tells later whose it was; a job that is started again and again would fill it. So the parent of mpirun has
all files of a job in one folder, and removes it when the job is over. A parent that is killed itself leaves its folder
to the next one on this host: the lock that it held on it is free then. It does not know jobs or mpirun.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

BYTES_A_RANK = 32 << 20
"""What there has to be for each rank; Open MPI takes half of it."""

PREFIX = "trtrun-job-"


@contextmanager
def own_shared_memory(
    variable: str, environment: Mapping[str, str], base: Path = SHARED_MEMORY
) -> Iterator[dict[str, str]]:
    """Make the folder, and remove it in the end with all that is in it.

    Args:
        variable: of the environment, that tells an MPI library where its files belong; empty where it has none.
        environment: of mpirun. A user who has set the variable keeps it.
        base: where shared memory is.

    Yields:
        What has to be added to the environment; nothing where there is no such place.
    """
    made = None if not variable or variable in environment else _make(base)
    if made is None:
        yield {}
        return
    folder, lock = made
    try:
        yield {variable: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def has_room(variable: str, environment: Mapping[str, str], num_ranks: int) -> bool:
    """Whether ranks of one host can say all that they say through its shared memory, so that they need no ports.

    Args:
        variable, environment: as of `own_shared_memory`.
        num_ranks: of this host.
    """
    folder = environment.get(variable) or SHARED_MEMORY
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and room.f_bavail * room.f_frsize >= num_ranks * BYTES_A_RANK


def _make(base: Path) -> tuple[Path, int] | None:
    """A new folder and its lock, once those are removed that nobody holds any more; None where none can be made."""
    try:
        _remove_abandoned(base)
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        lock = os.open(new, os.O_RDONLY)  # this process's alone: ranks do not inherit it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name it is never without its lock, so that nobody else takes it for abandoned.
        return new.rename(base / new.name.removeprefix(".")), lock
    except OSError:
        return None


def _remove_abandoned(base: Path) -> None:
    for entry in list(os.scandir(base)):
        if entry.name.startswith(PREFIX) and _is_abandoned(entry):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is this user's and its parent of mpirun is gone."""
    with suppress(OSError):
        if entry.stat(follow_symlinks=False).st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
            return False
        lock = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(lock)
    return False
