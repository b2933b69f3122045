"""What is wrong on several ranks of a job, told by rank 0 for all of them, one line each.

A rank that just ended with its own problem would take the others along before they could tell theirs.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar

from launch.exit_codes import ExitCode
from parallel.mpi_rank import MpiRank
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
    problems = [text for text in _gather(problem) if text is not None]
    if problems:
        if place.rank == 0:
            for text in problems:
                print(f"trtrun: {' '.join(text.split())}", file=sys.stderr, flush=True)
        # The end of rank 0 ends the job; the others wait for it at the end of MPI.
        raise SystemExit(ExitCode.REFUSED if place.rank == 0 else ExitCode.DONE)
    assert result is not None
    return result


def _gather(problem: str | None) -> list[str | None]:
    """Every rank's problem, on all ranks, in rank order. Collective."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    own = json.dumps(problem).encode()
    lengths = array("i", [0] * world.Get_size())
    world.Allgather(array("i", [len(own)]), lengths)
    starts = [0, *accumulate(lengths)]
    everything = bytearray(starts[-1])
    world.Allgatherv((own, MPI.BYTE), (everything, (list(lengths), starts[:-1]), MPI.BYTE))
    return [json.loads(everything[start:stop]) for start, stop in pairwise(starts)]
