"""Whether this process is an MPI rank, and which: told from the environment, before MPI is touched; and whether MPI
goes on when one of its ranks is gone, and how it says so (ULFM, User Level Failure Mitigation).

With ULFM a call that needs a lost rank fails with an error of its own, and all other calls go on. It knows the
variables that mpirun and srun set, and what MPI's errors mean. It does not know what ranks are for, which of them a job
can do without, or who is at fault: the heartbeat (`parallel.watchdog`) names a lost rank, and whoever only meets the
error waits for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
"""Size and rank as Open MPI's mpirun names them, and as Hydra's (MPICH) and Slurm's PMI do."""


@dataclass(frozen=True)
class MpiRank:
    """This process's place among the ranks that mpirun or srun started."""

    rank: int
    size: int


def find_mpi_rank(environment: Mapping[str, str] | None = None) -> MpiRank | None:
    """Return this process's rank and the world's size, or None when nothing started it as a rank. MPI is not touched.

    Of srun's processes those are ranks that got numbers for an MPI library (--mpi=pmix, --mpi=pmi2). A step of one task
    is none, because a shell of the user's may run in one: what it starts is to start the ranks.
    """
    values = os.environ if environment is None else environment
    for size_name, rank_name in _VARIABLES:
        size, rank = values.get(size_name, ""), values.get(rank_name, "")
        if size.isdecimal() and rank.isdecimal() and not _is_lone_step(values):
            return MpiRank(int(rank), int(size))
    rank, tasks = values.get("PMIX_RANK", ""), values.get("SLURM_STEP_NUM_TASKS", "")
    # Slurm tells the size only by its own name. Where its number is another one, PMIx is somebody else's.
    if rank.isdecimal() and tasks.isdecimal() and int(tasks) > 1 and rank == values.get("SLURM_PROCID"):
        return MpiRank(int(rank), int(tasks))
    return None


def _is_lone_step(values: Mapping[str, str]) -> bool:
    """Whether the numbers are those of an srun of one task, not of an mpirun inside it."""
    mpiruns = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
    is_step = values.get("SLURM_STEP_ID", "").isdecimal() and values.get("SLURM_STEP_NUM_TASKS") == "1"
    return is_step and not any(name in values for name in mpiruns)


FAULT_TOLERANCE_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Set by Open MPI's mpirun for the ranks of a job that was started with `--with-ft ulfm`."""

_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def outlives_ranks(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this job's MPI, and what started it, go on when a rank dies. MPI is not touched.

    Args:
        environment: of a rank; default os.environ.
    """
    values = os.environ if environment is None else environment
    return values.get(FAULT_TOLERANCE_VARIABLE, "").lower() in ("1", "true", "yes", "on")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception is MPI's error that a rank which a call needed is gone."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not isinstance(error, module.Exception):
        return False
    return error.Get_error_class() in {getattr(module, name) for name in _CLASSES}
