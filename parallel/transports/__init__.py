"""Implementations of the Communicator protocol: one process, MPI for host tensors, NCCL for CUDA tensors.

`open_communicator` chooses one. All ranks of the group choose together, so that they choose the same.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING

import torch

from parallel.communicator import Communicator
from parallel.mpi_rank import all_gather_json
from parallel.transports.solo import SoloCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI


def open_communicator(
    device: torch.device,
    mpi_comm: MPI.Intracomm | None,
    name: str,
    may_spin: bool = False,
    sums_often: bool = True,
) -> Communicator:
    """Open the best transport for a group of ranks and use every operation once. Collective over `mpi_comm`.

    A group of one is solo. NCCL serves a group whose ranks all have CUDA devices that NCCL can use, no two the same;
    MPI serves the rest, with CUDA tensors staged through host memory.

    Args:
        device: where this rank's tensors live.
        mpi_comm: the group's ranks; it is duplicated, the caller keeps it. None for a group of one.
        name: for messages, such as "target".
        may_spin: whether this rank has a core to itself while it waits for a peer (see parallel.waiting.Waiter).
        sums_often: whether sums are worth some memory, and some time at the start to measure them.
    """
    communicator: Communicator
    if mpi_comm is None or mpi_comm.Get_size() == 1:
        communicator = SoloCommunicator(name, device)
    else:
        # mpi4py starts MPI when it is imported, which a job of one process must not do.
        from parallel.transports.mpi import MpiCommunicator
        from parallel.transports.nccl import NcclCommunicator

        if _nccl_serves(device, mpi_comm):
            communicator = NcclCommunicator(mpi_comm.Dup(), name, device, sums_often)
        else:
            communicator = MpiCommunicator(mpi_comm.Dup(), name, device, may_spin)
    communicator.warm_up()
    return communicator


def _nccl_serves(device: torch.device, mpi_comm: MPI.Intracomm) -> bool:
    """Return whether NCCL can connect all ranks of the group: the same answer on every rank."""
    from parallel.transports.nccl import why_not

    usable = why_not(device) is None
    place = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)] if usable else None
    places = all_gather_json(mpi_comm, place)
    # NCCL refuses two ranks on one GPU unless told otherwise (since 2.30).
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    distinct = len({json.dumps(item) for item in places}) == len(places)
    return None not in places and (distinct or shared)
