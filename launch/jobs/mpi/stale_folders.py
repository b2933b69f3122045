"""Removes what killed mpiruns and their daemons left on a host, because it keeps others from starting.

Open MPI's programs keep a folder each, named by process id; those of Open MPI 4 lie in one of the host and user. One
that was killed leaves it behind, and with Open MPI 5 the next process of the same id then ends with "The PMIx server's
listener thread failed to start": soon, in a container, where ids are small and come again. PMIx after 5.0 reclaims such
a folder by itself. This module does not know jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

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
