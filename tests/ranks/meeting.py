"""Ranks that wait for each other asleep.

MPI's own waits keep a core busy, which rank 0 needs where it makes or computes something alone. It knows no test.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def meet(comm: MPI.Intracomm | None = None) -> None:
    """Sleep until every rank is here, of all or of a communicator."""
    from mpi4py import MPI

    barrier = (comm or MPI.COMM_WORLD).Ibarrier()
    while not barrier.Test():
        time.sleep(0.001)


def from_rank_0(value: T | None) -> T:
    """What rank 0 gives, on all ranks."""
    from mpi4py import MPI

    meet()
    shared: T = MPI.COMM_WORLD.bcast(value)
    return shared
