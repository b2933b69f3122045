"""Folders of this host that mpirun and its ranks use: those that mpirun needs, a job's own for shared memory, and what
killed jobs left, which keeps others from starting.

Ranks of one host exchange messages through files in /dev/shm. A rank that is killed leaves its file there, in memory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.jobs.placement.allocation import is_outside

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


_FOLDER = re.compile(r"[a-z]+\.(?P<process>\d+)")
_PROGRAMS = ("ompi", "prte", "prted", "prterun")
"""Before the process id, in the names of folders that nothing but the name tells from a user's own."""

_ADDRESS = re.compile(r"tcp[46]?://(?P<host>[^;,\s]+)(,[^;\s]+)?:(?P<port>\d+)")
_CONNECT_SECONDS = 1.0
_BASES = ("PRTE_MCA_prte_tmpdir_base", "TMPDIR", "TEMP", "TMP")


def remove_stale_folders(environment: Mapping[str, str]) -> None:
    """Remove the folders of this user's on this host whose process is gone. What cannot be removed stays.

    A folder says by a file in it which host it belongs to, and at which port its process listens. So those of other
    hosts that share the file system stay, and those of processes that a container cannot see.

    Args:
        environment: of mpirun or of its daemon; tells where their folders are.
    """
    base = _base(environment)
    with suppress(OSError):
        for folder in [*_find_abandoned(base), *_find_abandoned_of_openmpi4(base)]:
            shutil.rmtree(folder, ignore_errors=True)


def remove_folder_of(process: int, environment: Mapping[str, str]) -> None:
    """Remove what an mpirun of this host has left of its folder that was killed, be it while it removed that itself:
    there is no file any more then that would say whose it is.

    Args:
        process: of the mpirun, which is gone.
        environment: of it.
    """
    base = _base(environment)
    for folder in (shared / f"pid.{process}" for shared in _shared_folders(base)):
        if not _listens(folder / "contact.txt"):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()  # if it was the last
    with suppress(OSError):
        for entry in list(os.scandir(base)):
            program, _, number = entry.name.partition(".")
            if program not in _PROGRAMS or number != str(process) or not entry.is_dir(follow_symlinks=False):
                continue
            is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            mark = _mark_of_this_host(entry.path)
            is_gone = not any(Path(entry.path).glob("pmix.*.tool")) if mark is None else not _listens(mark)
            if is_own and is_gone:
                shutil.rmtree(entry.path, ignore_errors=True)


def _base(environment: Mapping[str, str]) -> Path:
    return Path(next((environment[name] for name in _BASES if environment.get(name)), "/tmp"))


def _find_abandoned(base: Path) -> Iterator[Path]:
    for entry in os.scandir(base):
        named = _FOLDER.fullmatch(entry.name)
        if named is None or not entry.is_dir(follow_symlinks=False):
            continue
        is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        mark = _mark_of_this_host(entry.path)
        if is_own and mark is not None and not _is_alive(int(named["process"])) and not _listens(mark):
            yield Path(entry.path)


def _shared_folders(base: Path) -> list[Path]:
    """Where Open MPI 4 keeps a folder for each of its programs of this host and user, if it is there."""
    folders = [base / f"ompi.{name}.{os.geteuid()}" for name in _host_names()]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _find_abandoned_of_openmpi4(base: Path) -> Iterator[Path]:
    for folder in (folder for shared in _shared_folders(base) for folder in shared.glob("pid.*")):
        number = folder.name.removeprefix("pid.")
        if number.isdecimal() and not _is_alive(int(number)) and not _listens(folder / "contact.txt"):
            yield folder


def _host_names() -> set[str]:
    host = socket.gethostname()
    return {host, host.partition(".")[0]}


def _mark_of_this_host(folder: str) -> Path | None:
    """The file by which a folder says that it belongs to this host, where it does."""
    marks = [Path(folder, f"pmix.{name}.tool") for name in _host_names()]
    return next(filter(Path.is_file, marks), None)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _listens(mark: Path) -> bool:
    """Whether somebody takes connections at the address in the first line, such as "prterun-node1-7@0.0;tcp4://…"."""
    found = None
    with suppress(OSError):
        found = _ADDRESS.search(mark.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    if found is None:
        return False
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


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
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        yield f"{SHARED_MEMORY} cannot be written, and ranks of one host speak through it: mount it for all users"
    if is_outside(environment):
        nodes, job = environment["SLURM_JOB_NODELIST"], environment.get("SLURM_JOB_ID", "?")
        yield (
            f"the environment is that of Slurm job {job} on {nodes}, and this host is none of these: mpirun starts "
            "ranks there; if the job is over, unset what begins with SLURM_"
        )


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
