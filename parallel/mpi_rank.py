"""Whether this process is an MPI rank, and which: told from the environment, before MPI is touched; whether MPI goes on
when one of its ranks is gone, and how it says so (ULFM, User Level Failure Mitigation); and one small value of every
rank on every rank.

With ULFM a call that needs a lost rank fails with an error of its own, and all other calls go on. Which rank is at
fault the heartbeat says (`parallel.watchdog`); whoever only meets the error waits for that. Values travel as JSON,
because mpi4py's own way would read others' pickles.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
"""Size and rank as Open MPI's mpirun names them, and as Hydra's (MPICH), Slurm's and PALS's PMI do."""

_PALS_HEADER = struct.Struct("@iNNNiNNiNNi")
"""Begins the file that HPE's launcher PALS writes for its ranks (PALS_APINFO), in the machine's own layout: a version,
sizes and places of what follows, and last the number of processes."""


@dataclass(frozen=True)
class MpiRank:
    """This process's place among the ranks that mpirun or srun started."""

    rank: int
    size: int


def find_mpi_rank(environment: Mapping[str, str] | None = None) -> MpiRank | None:
    """Return this process's rank and the world's size, or None when nothing started it as a rank. MPI is not touched.

    PALS tells each process its rank, and the size in a file, where it speaks no PMI that tells both.

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
    return _find_pals_rank(values)


def _find_pals_rank(values: Mapping[str, str]) -> MpiRank | None:
    """The place of a process that PALS started with others; None where it did not, or its file cannot be read."""
    rank = values.get("PALS_RANKID", "")
    if not rank.isdecimal():
        return None
    try:
        with open(values.get("PALS_APINFO", ""), "rb") as file:
            size = _PALS_HEADER.unpack(file.read(_PALS_HEADER.size))[-1]
    except (OSError, struct.error):
        return None
    return MpiRank(int(rank), size) if size > max(1, int(rank)) else None


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


if TYPE_CHECKING:
    from mpi4py import MPI


def all_gather_json(comm: MPI.Intracomm, value: Any) -> list[Any]:
    """Every rank's value, what JSON can hold, in rank order. Collective over `comm`."""
    from mpi4py import MPI

    own = json.dumps(value).encode()
    lengths = array("i", [0] * comm.Get_size())
    comm.Allgather(array("i", [len(own)]), lengths)
    starts = [0, *accumulate(lengths)]
    everything = bytearray(starts[-1])
    comm.Allgatherv((own, MPI.BYTE), (everything, (list(lengths), starts[:-1]), MPI.BYTE))
    return [json.loads(everything[start:stop]) for start, stop in pairwise(starts)]
