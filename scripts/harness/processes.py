"""Processes: what a new one is given, and what /proc shows of those that run.

It does not know requests, nor what a process is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
"""This checkout, whose code servers run."""


def child_environment(extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """This process's environment, in which Python finds this checkout, and `extra`."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, **extra}


def server_environment(extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The same for a server, with one thread a rank unless the environment says otherwise."""
    return {"OMP_NUM_THREADS": "1", **child_environment(extra)}


def all_processes() -> list[int]:
    """Process ids of all processes, zombies among them."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    fields = _status_fields(process)
    return fields is not None and fields[0] != "Z"


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


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The MPI rank that an environment makes of a process; None where it makes none."""
    rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("PMI_RANK"))
    return None if rank is None else int(rank)


def descendants_of(process: int) -> Iterator[int]:
    """Process ids of all that descend from a process and run."""
    children = _all_children()
    waiting = [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        yield from below


def ranks_below(process: int) -> dict[int, int]:
    """Process ids of the MPI ranks that descend from a process, by rank."""
    found = {}
    for child in descendants_of(process):
        rank = rank_of(environment_of(child))
        if rank is not None:
            found[rank] = child
    return found


def cpu_seconds(process: int) -> float:
    """User and system seconds that a process has taken so far; 0 where it is gone."""
    fields = _status_fields(process)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_fields(process: int) -> list[str] | None:
    """State, parent and what follows of /proc's `stat`; None where the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
