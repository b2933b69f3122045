"""What is wrong on several ranks of a job, told by rank 0 for all of them, one line each.

A rank that just ended with its own problem would take the others along before they could tell theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from launch.exit_codes import ExitCode
from parallel.mpi_rank import MpiRank, all_gather_json
from trtrun.errors import TrtrunError

Result = TypeVar("Result")


def agree_on(make: Callable[[], Result], place: MpiRank | None) -> Result:
    """Return what `make` makes, once all ranks agree that they could make it. Collective under mpirun.

    Args:
        make: raises a TrtrunError for what is wrong on this rank.
        place: of this process among the ranks of mpirun.

    Raises:
        TrtrunError: what is wrong, in a process alone.
        SystemExit: something is wrong on some rank, and rank 0 has told it.
    """
    if place is None or place.size == 1:
        return make()
    try:
        result, problem = make(), None
    except TrtrunError as error:
        result, problem = None, str(error)
    from mpi4py import MPI

    problems = [text for text in all_gather_json(MPI.COMM_WORLD, problem) if text is not None]
    if problems:
        if place.rank == 0:
            for text in problems:
                print(f"trtrun: {' '.join(text.split())}", file=sys.stderr, flush=True)
        # The end of rank 0 ends the job; the others wait for it at the end of MPI.
        raise SystemExit(ExitCode.REFUSED if place.rank == 0 else ExitCode.DONE)
    assert result is not None
    return result
