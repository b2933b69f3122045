"""One rank's whole job: which communicators it opens, what it starts, what it runs until the end.

It joins the pieces: `open_job` gives the orchestrator a fleet, in one process or over MPI, and on worker ranks it runs
to the end. It does not know requests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel.control import ControlPlane
from parallel.groups import open_groups
from parallel.topology import Topology
from trtrun.config import RuntimeConfig
from trtrun.outputs import RankReport, StartReport
from trtrun.roles.fleet import Fleet, MpiFleet, SoloFleet, serve
from trtrun.roles.rendezvous import start_orchestrator, start_worker
from trtrun.roles.startup import Progress, RankStartup, device_of
from trtrun.threads import threads_per_slot

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Job:
    """What the orchestrator has once every rank is up.

    Attributes:
        fleet: the engine ranks.
        num_blocks: blocks of every KV store, the null block included.
        report: what each rank holds.
    """

    fleet: Fleet
    num_blocks: int
    report: StartReport


def topology_of(config: RuntimeConfig) -> Topology:
    """Who sits where, from the configuration's device lists."""
    return Topology.from_devices(config.draft_devices, config.target.devices, config.launch.orchestrator_host)


def open_job(config: RuntimeConfig, progress: Progress | None) -> Job | None:
    """Start this rank.

    Returns:
        The job on the orchestrator rank. None on a worker rank, after it has served to the end.

    Raises:
        TopologyError: the MPI world has another size than the devices need.
        TrtrunError: on the orchestrator, when any rank could not start.
    """
    topology = topology_of(config)
    torch.set_num_threads(threads_per_slot(config.threads, len(topology.slots)))
    if topology.world_size == 1 and not started_by_mpi():
        return _open_solo(config, topology, progress)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    topology.check_world(world.size)
    if topology.world_size == 1:
        return _open_solo(config, topology, progress)
    control = ControlPlane(world, topology)
    try:
        return _open_ranks(config, topology, control, world, progress)
    except Exception as error:
        if world.rank != topology.orchestrator_rank:
            control.abort(f"{type(error).__name__}: {error}")
        raise


def started_by_mpi() -> bool:
    """Whether a launcher of Open MPI, MPICH or Slurm's PMI started this process."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"))


def _open_solo(config: RuntimeConfig, topology: Topology, progress: Progress | None) -> Job:
    groups = open_groups(None, topology, device_of(topology.slots[0]))
    startup = RankStartup(config, topology, 0, groups)
    blocks = startup.load(progress or (lambda done, total: None))
    worker, report = startup.finish(blocks)
    return Job(SoloFleet(worker), blocks, StartReport((report,)))


def _open_ranks(
    config: RuntimeConfig, topology: Topology, control: ControlPlane, world: MPI.Intracomm, progress: Progress | None
) -> Job | None:
    slot = topology.slot(world.rank)
    groups = open_groups(world, topology, device_of(slot) if slot is not None else torch.device("cpu"))
    control.warm_up()
    if world.rank == topology.orchestrator_rank:
        blocks, reports = start_orchestrator(control, topology, progress)
        return Job(MpiFleet(control), blocks, StartReport((_orchestrator_report(), *reports)))
    worker = start_worker(control, lambda: RankStartup(config, topology, world.rank, groups))
    if worker is not None:
        serve(control, worker)
    return None


def _orchestrator_report() -> RankReport:
    return RankReport(rank=0, host=os.uname().nodename, role="orchestrator", device="host")
