"""A job of four ranks in which one raises, while the others wait where ranks wait. The environment says which one."""

from __future__ import annotations

import os
import time

import torch
from mpi4py import MPI

from parallel.control import ControlPlane
from parallel.groups import open_groups
from parallel.link import Link
from parallel.topology import Topology


def main() -> None:
    failing = int(os.environ["FAILING_RANK"])
    topology = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
    world = MPI.COMM_WORLD
    control = ControlPlane(world, topology)
    try:
        groups = open_groups(world, topology, torch.device("cpu"))
        control.warm_up()
        if world.rank == failing:
            print(f"failing at {time.time()}", flush=True)
            raise ValueError("request 7:\nno such token")
        if world.rank == 0:
            control.collect()  # a report that never comes
        elif world.rank == 1:
            control.receive()  # a plan that never comes
        elif world.rank == 2 and failing != 3:
            Link(topology, 2, groups.workers).receive_draft(1, 4, 0, 8)  # a draft that never comes
        elif groups.target is not None:
            groups.target.all_reduce(torch.ones(4))  # a peer that never comes
    except Exception as error:
        control.abort(f"{type(error).__name__}: {error}")


main()
