"""Whether this process is an MPI rank, and which: told from the environment, before MPI is touched.

It knows the variables that mpirun and srun set. It does not know what the ranks are for.
"""

from __future__ import annotations

import os
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
