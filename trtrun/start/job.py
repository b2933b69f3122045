"""One rank's whole job: which communicators it opens, what it starts, what it runs until the end, and how ranks agree.

`open_job` gives the orchestrator its engine ranks, in one process or over MPI, and on worker ranks it runs to the end.

While a job starts, messages are JSON texts on the control plane, before the first plan. The orchestrator sends what
config.json of the models says, which no other rank has to read. Each worker sends `progress` while it loads, then
`loaded` with the KV blocks that it could hold. The orchestrator answers with the smallest number; workers allocate,
warm up and send `ready`. A worker that cannot start for a reason that the user can mend sends `failed` in the place of
one of the two.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from parallel import abort
from parallel.control import ControlPlane
from parallel.errors import ParallelError, TopologyError
from parallel.groups import open_groups
from parallel.mpi_rank import find_mpi_rank, is_lost_peer
from parallel.probe import verify_groups
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.fault_attribution import CLOSED_SECONDS
from parallel.watchdog.heartbeat import HeartbeatClient, invite_workers, join_heartbeat
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.core.outputs import RankReport, StartReport
from trtrun.errors import PlacementError, StartError, TrtrunError
from trtrun.garbage import leaving_out_what_is
from trtrun.kvcache.sizing import StoreSize, check_device
from trtrun.rounds.engine_ranks import EngineRanks, MpiRanks
from trtrun.rounds.failures import RankFailures, losable_ranks, unawaited_ranks
from trtrun.rounds.round import Worker
from trtrun.rounds.served_rank import serve
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import Progress, RankStartup, device_of
from trtrun.threads import has_free_cores, threads_per_slot

_PROGRESS_INTERVAL = 0.1
"""Seconds between two progress messages of one rank."""


def start_worker(control: ControlPlane, startup: Callable[[bytes], RankStartup]) -> Worker | None:
    """A worker rank's side; returns None when some rank failed and the job is to end."""
    last_sent = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if now - last_sent >= _PROGRESS_INTERVAL or done >= total:
            last_sent = now
            _send(control, {"kind": "progress", "done": done, "total": total})

    try:
        told = control.receive()
        if told is None:
            return None
        rank = startup(told)
        size = rank.load(progress)
        _send(control, {"kind": "loaded", "size": size})
        answer = control.receive(timeout=None)
        if answer is None:
            return None
        worker, report = rank.finish(StoreSize(*json.loads(bytes(answer))["size"]))
    except (TrtrunError, ParallelError) as error:
        # The user's mistake, not a defect: the orchestrator says it once, for all ranks.
        _send(control, {"kind": "failed", "message": str(error)})
        while not control.is_shut_down:
            control.receive(timeout=None)  # the other ranks' answer, which may be on its way
        return None
    _send(control, {"kind": "ready", "report": asdict(report)})
    return worker


def start_orchestrator(
    control: ControlPlane, spec: JobSpec, failures: RankFailures, progress: Progress | None
) -> tuple[StoreSize, tuple[RankReport, ...]]:
    """The orchestrator's side.

    Args:
        control: the control plane.
        spec: of the job.
        failures: of the ranks.
        progress: called with the bytes of weights that are in place and that will be, over all ranks, or None.

    Returns:
        The size of every store, and all workers' reports in rank order.

    Raises:
        StartError: with the message of the first rank that could not start; the others are let go.
        RankFailedError: a rank failed in another way, or the start takes too long.
    """
    control.publish(spec.encode_models())
    messages = _Messages(control, spec.topology, failures, progress)
    loaded = messages.await_all("loaded")
    size = StoreSize.smallest(StoreSize(*message["size"]) for message in loaded.values())
    control.publish(json.dumps({"size": size}).encode())
    ready = messages.await_all("ready")
    return size, tuple(RankReport(**ready[rank]["report"]) for rank in sorted(ready))


@dataclass
class _Messages:
    """What the workers send while they start."""

    control: ControlPlane
    topology: Topology
    failures: RankFailures
    progress: Progress | None
    _read: dict[int, tuple[int, int]] = field(default_factory=dict)

    def await_all(self, kind: str) -> dict[int, dict[str, Any]]:
        """Messages of one kind from every worker rank, by rank."""
        messages: dict[int, dict[str, Any]] = {}
        workers = len(self.topology.worker_ranks)
        while len(messages) < workers:
            received = self.failures.collect(self.control)
            message = json.loads(received.payload)
            if message["kind"] == "failed":
                if kind != "loaded":
                    abort.abort_at_exit()  # the others wait for this rank, in the middle of their warm-up
                self.control.shut_down()
                raise StartError(message["message"])
            if message["kind"] == "progress":
                self._show(received.rank, message["done"], message["total"])
            elif message["kind"] == kind:
                messages[received.rank] = message
        return messages

    def _show(self, rank: int, done: int, total: int) -> None:
        self._read[rank] = (done, total)
        if self.progress is not None and len(self._read) == len(self.topology.worker_ranks):
            self.progress(sum(done for done, _ in self._read.values()), sum(total for _, total in self._read.values()))


def _send(control: ControlPlane, message: dict[str, Any]) -> None:
    control.report(json.dumps(message).encode())


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
        size: of every KV store.
        report: what each rank holds.
    """

    engine_ranks: EngineRanks
    size: StoreSize
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
    size = startup.load(progress or (lambda done, total: None))
    worker, report = startup.finish(size)
    assert isinstance(worker, Worker)  # one device holds both engines
    return StartedJob(SoloRanks(worker, launches_ahead=worker.device.type == "cuda"), size, StartReport((report,)))


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
        size, reports = start_orchestrator(control, spec, failures, progress)
    except BaseException:
        if heartbeat.has_failed():
            abort.abort_at_exit()  # the other ranks hang
        heartbeat.close()
        raise
    activity.rest()
    heartbeat.finish_start()
    own = RankReport(rank=0, host=os.uname().nodename, role="orchestrator", device="host")
    return StartedJob(MpiRanks(control, activity, failures), size, StartReport((own, *reports)))


def _run_worker(spec: JobSpec, control: ControlPlane, world: MPI.Intracomm, may_spin: bool) -> None:
    """A rank with a device: start its engines, and run rounds until the orchestrator lets it end."""
    config, topology, activity = spec.config, spec.topology, Activity()
    expendable = losable_ranks(config, topology)
    heartbeat = join_heartbeat(control, topology, activity, config.launch.heartbeat_seconds, expendable)
    slot = topology.slot(world.rank)
    assert slot is not None
    activity.start(Phase.CONNECTING)
    begun = time.monotonic()
    groups = open_groups(world, topology, device_of(slot), may_spin)
    verify_groups(groups, topology, world.rank)
    control.warm_up()
    seconds = {"communicators": round(time.monotonic() - begun, 3)}
    try:
        is_lost = partial(_is_lost, heartbeat, topology)
        worker = start_worker(
            control,
            lambda message: RankStartup(spec.with_models(message), world.rank, groups, activity, is_lost, seconds),
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
