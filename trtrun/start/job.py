"""One rank's whole job: which communicators it opens, what it starts, what it runs until the end.

It joins the pieces: `open_job` gives the orchestrator its engine ranks, in one process or over MPI, and on worker ranks
it runs to the end. It does not know requests.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from parallel import abort
from parallel.control import ControlPlane
from parallel.errors import TopologyError
from parallel.groups import open_groups
from parallel.mpi_rank import find_mpi_rank, is_lost_peer
from parallel.probe import verify_groups
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.fault_attribution import CLOSED_SECONDS
from parallel.watchdog.heartbeat import HeartbeatClient, invite_workers, join_heartbeat
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.core.outputs import RankReport, StartReport
from trtrun.errors import PlacementError
from trtrun.garbage import leaving_out_what_is
from trtrun.kvcache.sizing import check_device
from trtrun.rounds.engine_ranks import EngineRanks, MpiRanks
from trtrun.rounds.failures import RankFailures, losable_ranks, unawaited_ranks
from trtrun.rounds.round import Worker
from trtrun.rounds.served_rank import serve
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.start.job_spec import JobSpec
from trtrun.start.rendezvous import start_orchestrator, start_worker
from trtrun.start.startup import Progress, RankStartup, device_of
from trtrun.threads import has_free_cores, threads_per_slot

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)
# A program that sets up no logging reads of a failure in its RankFailedError: Python would print it there once more.
logger.addHandler(logging.NullHandler())


@dataclass
class StartedJob:
    """What the orchestrator has once every rank is up.

    Attributes:
        engine_ranks: as the orchestrator sees them.
        num_blocks: blocks of every KV store, the null block included.
        report: what each rank holds.
    """

    engine_ranks: EngineRanks
    num_blocks: int
    report: StartReport


def open_job(spec: JobSpec, progress: Progress | None) -> StartedJob | None:
    """Start this rank.

    Returns:
        The job on the orchestrator rank. None on a worker rank, after it has served to the end.

    Raises:
        PlacementError: the MPI world has another size than the devices need.
        StartError: on the orchestrator, when any rank could not start.
        RankFailedError: on the orchestrator, when any rank failed while it started, or the start takes too long.
    """
    config, topology = spec.config, spec.topology
    if topology.world_size == 1 and find_mpi_rank() is None:
        torch.set_num_threads(threads_per_slot(config.threads, 1))
        return _open_solo(spec, progress)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        topology.check_world(world.size)
    except TopologyError as error:
        raise PlacementError(str(error)) from None
    host = topology.host(world.rank)
    threads = threads_per_slot(config.threads, len(topology.slots_of_host(host)))
    torch.set_num_threads(threads)
    if topology.world_size == 1:
        return _open_solo(spec, progress)
    may_spin = has_free_cores(topology, host, threads)
    if losable_ranks(config, topology):
        abort.leave_at_exit()
    if world.rank == topology.orchestrator_rank:
        return _open_orchestrator(spec, world, progress, may_spin)
    control = ControlPlane(world, topology, may_spin)
    try:
        _run_worker(spec, control, world, may_spin)
    except Exception as error:
        # Rank 0 is not told, or has let this rank go: there is no other way to end the job.
        control.abort(_cause(error))
    return None


def _open_solo(spec: JobSpec, progress: Progress | None) -> StartedJob:
    topology = spec.topology
    check_device(topology.slots[0].device)
    groups = open_groups(None, topology, device_of(topology.slots[0]))
    startup = RankStartup(spec, 0, groups)
    blocks = startup.load(progress or (lambda done, total: None))
    worker, report = startup.finish(blocks)
    assert isinstance(worker, Worker)  # one device holds both engines
    return StartedJob(SoloRanks(worker, launches_ahead=worker.device.type == "cuda"), blocks, StartReport((report,)))


def _open_orchestrator(spec: JobSpec, world: MPI.Intracomm, progress: Progress | None, may_spin: bool) -> StartedJob:
    """Rank 0 without a device: start the others, under a deadline from here on."""
    config, topology = spec.config, spec.topology
    abort.stand_by()
    activity = Activity()
    limit = config.launch.heartbeat_seconds
    # Before anything collective: a rank that never comes must not keep this one from saying so.
    seconds = config.launch.start_seconds
    overdue = f"the job has not started within {seconds:g} s (launch.start_seconds)"
    heartbeat = HeartbeatServer(
        topology,
        activity,
        limit,
        seconds,
        overdue,
        expendable=losable_ranks(config, topology),
        unawaited=unawaited_ranks(config, topology),
    )
    try:
        control = ControlPlane(world, topology, may_spin)
        invite_workers(control, topology, heartbeat)
        activity.start(Phase.CONNECTING)
        open_groups(world, topology, torch.device("cpu"))
        control.warm_up()
        activity.start(Phase.LOADED)
        failures = RankFailures(heartbeat, control)
        blocks, reports = start_orchestrator(control, spec, failures, progress)
    except BaseException:
        if heartbeat.has_failed():
            abort.abort_at_exit()  # the other ranks hang
        heartbeat.close()
        raise
    activity.rest()
    heartbeat.finish_start()
    return StartedJob(MpiRanks(control, activity, failures), blocks, StartReport((_orchestrator_report(), *reports)))


def _run_worker(spec: JobSpec, control: ControlPlane, world: MPI.Intracomm, may_spin: bool) -> None:
    """A rank with a device: start its engines, and run rounds until the orchestrator lets it end."""
    config, topology, activity = spec.config, spec.topology, Activity()
    expendable = losable_ranks(config, topology)
    heartbeat = join_heartbeat(control, topology, activity, config.launch.heartbeat_seconds, expendable)
    slot = topology.slot(world.rank)
    assert slot is not None
    activity.start(Phase.CONNECTING)
    groups = open_groups(world, topology, device_of(slot), may_spin)
    verify_groups(groups, topology, world.rank)
    control.warm_up()
    try:
        is_lost = partial(_is_lost, heartbeat, topology)
        worker = start_worker(
            control, lambda told: RankStartup(spec.told_by(told), world.rank, groups, activity, is_lost)
        )
        if worker is not None:
            heartbeat.send_now()
            with leaving_out_what_is():
                serve(control, worker)
            worker.close()  # NCCL's communicators wait for graphs that hold their operations
            if not heartbeat.lost_ranks:  # else MPI may not agree to it; the end of the process does
                groups.close()
    except Exception as error:
        logger.error("this rank failed", exc_info=True, extra={"file_only": True})
        # Where another rank is gone, that one is at fault, and the heartbeat is about to say so.
        heartbeat.fail(_cause(error), grace=2 * CLOSED_SECONDS if is_lost_peer(error) else 0.0)
        raise
    heartbeat.close()


def _is_lost(heartbeat: HeartbeatClient, topology: Topology) -> bool:
    """Whether the draft engine is lost, as far as this rank was told."""
    return bool(heartbeat.lost_ranks.intersection(topology.draft_ranks))


def _cause(error: Exception) -> str:
    """An exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _orchestrator_report() -> RankReport:
    return RankReport(rank=0, host=os.uname().nodename, role="orchestrator", device="host")
