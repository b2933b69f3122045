"""One small value of every rank on every rank: JSON over MPI, because mpi4py's own way would read others' pickles.

It knows bytes and lengths, and nothing of what the values mean.
"""

from __future__ import annotations

import json
from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

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
