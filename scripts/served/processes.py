"""Processes of a server: what a new one is given, and what /proc shows of those that run.

It does not know requests, nor what a process is for.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""This checkout, whose code servers run."""


def server_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a server of this checkout, with one thread a rank unless it says otherwise."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, **(extra or {})}


def all_processes() -> list[int]:
    """Process ids of all processes, zombies among them."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    fields = _status_fields(process)
    return fields is not None and fields[0] != "Z"


def children_of(process: int) -> list[int]:
    """Its child processes that run."""
    return _all_children().get(process, [])


def _all_children() -> dict[int, list[int]]:
    """The child processes that run, of each process that has any."""
    found: dict[int, list[int]] = {}
    for other in all_processes():
        fields = _status_fields(other)
        if fields is not None and fields[0] != "Z":
            found.setdefault(int(fields[1]), []).append(other)
    return found


def environment_of(process: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone."""
    try:
        items = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, sign, value in (item.partition("=") for item in items) if sign}


def words_of(process: int) -> list[str]:
    """The words of a process's command line; empty where it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def rank_of(environment: dict[str, str]) -> int | None:
    """The MPI rank that an environment makes of a process; None where it makes none."""
    rank = environment.get("OMPI_COMM_WORLD_RANK")
    return None if rank is None else int(rank)


def ranks_below(process: int) -> dict[int, int]:
    """Process ids of the MPI ranks that descend from a process, by rank."""
    found: dict[int, int] = {}
    children = _all_children()
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        for child in children.get(parent, []):
            waiting.append(child)
            rank = rank_of(environment_of(child))
            if rank is not None:
                found[rank] = child
    return found


def _status_fields(process: int) -> list[str] | None:
    """State, parent and what follows of /proc's `stat`; None where the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
