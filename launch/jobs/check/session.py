"""One rank's part in a check: what it knows, the steps that rank 0 names, and the heartbeat that watches them.

Rank 0 names steps over the control plane and the ranks that a step concerns report. Who is late is the heartbeat's
business, as in a run. It does not know what the steps are for (rank_check.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from launch.jobs.check.held_models import count_engine_bytes
from launch.jobs.check.inventory import RankInventory, find_misfits, take_inventory
from launch.jobs.mpi.start_progress import DONE, StartProgress
from parallel.control import ControlPlane
from parallel.errors import HeartbeatError
from parallel.groups import Groups, open_groups
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.heartbeat import HeartbeatClient, invite_workers, join_heartbeat
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.errors import TrtrunError
from trtrun.rounds.failures import RankFailures
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import device_of
from trtrun.threads import has_free_cores, threads_per_slot

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

JOIN = 1
"""Number of a rank's step for `start_progress`: it connects to the heartbeat, which watches it from then on."""


READ_BYTES_A_SECOND = 100e6
"""Of slow disks, which all ranks read from together."""


class SetupError(TrtrunError):
    """The ranks do not fit together.

    Attributes:
        problems: all that is wrong, one line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Session:
    """One rank's part in a check: the control plane, the heartbeat beside it, and what has been opened.

    Rank 0's heartbeat watches the check as it watches a start: it knows the step that each rank is in, and ends the job
    when time is over, also where rank 0 itself waits inside MPI.
    """

    def __init__(
        self, spec: JobSpec, world: MPI.Intracomm, seconds: float, *, is_thorough: bool, looks_at_devices: bool
    ) -> None:
        self._is_thorough, self._looks_at_devices = is_thorough, looks_at_devices
        self._spec = spec
        self.config = spec.config
        self.topology = topology = spec.topology
        self.world = world
        self.rank: int = world.Get_rank()
        self.groups: Groups | None = None
        self._activity = Activity()
        self._may_spin = self.rank < topology.world_size and self._has_free_cores()  # links are as fast as in a job
        self._failures: RankFailures | None = None
        self._heartbeat: HeartbeatServer | HeartbeatClient
        with StartProgress() as teller:
            teller.tell(JOIN, "joining the check")
            if self.rank == topology.orchestrator_rank:
                self._heartbeat = self._lead(seconds)
            else:
                self.control = ControlPlane(world, topology, self._may_spin)
                self._heartbeat = self._follow()
            teller.tell(DONE, "the start")

    @classmethod
    def open(
        cls, spec: JobSpec, seconds: float, *, is_thorough: bool = False, looks_at_devices: bool = True
    ) -> Session:
        """Join the check. Collective.

        Args:
            spec: of the job, as this rank sees it.
            seconds: that the check may take from now on; only rank 0's count. A rank that does not come ends the job.
            is_thorough: as of `take_inventory`; ranks have more time for engines, by READ_BYTES_A_SECOND.
            looks_at_devices: as of `take_inventory`.
        """
        from mpi4py import MPI

        return cls(spec, MPI.COMM_WORLD, seconds, is_thorough=is_thorough, looks_at_devices=looks_at_devices)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else other ranks may not come here: the end of this one ends the job
            if self.groups is not None:
                self.groups.close()
            self.control.close()
        self._heartbeat.close()

    def _has_free_cores(self) -> bool:
        host = self.topology.host(self.rank)
        threads = threads_per_slot(self.config.threads, len(self.topology.slots_of_host(host)))
        return has_free_cores(self.topology, host, threads)

    def _lead(self, seconds: float) -> HeartbeatServer:
        launch = self.config.launch
        more = count_engine_bytes(self.config) / READ_BYTES_A_SECOND if self._is_thorough else 0
        overdue = f"the check did not end within {launch.check_seconds:g} s (launch.check_seconds)"
        if more:
            overdue += f", and {more:.0f} s for the weights of engines"
        seconds += more
        # Before anything collective: a rank that never comes must not keep this one from saying so.
        server = HeartbeatServer(self.topology, self._activity, launch.heartbeat_seconds, seconds, overdue)
        self._failures = RankFailures(server)
        self._activity.check("joining the check")
        self.control = ControlPlane(self.world, self.topology, self._may_spin)
        invite_workers(self.control, self.topology, server)
        return server

    def _follow(self) -> HeartbeatClient:
        try:
            return join_heartbeat(self.control, self.topology, self._activity, self.config.launch.heartbeat_seconds)
        except HeartbeatError as error:  # rank 0 waits for this rank
            self.control.abort(f"{type(error).__name__}: {error}")

    def begin(self, title: str) -> None:
        """This rank begins a step."""
        logger.info("check: %s", title)
        self._activity.check(title)
        if isinstance(self._heartbeat, HeartbeatClient):
            self._heartbeat.send_now()  # with the next regular heartbeat it might be too late

    # Rank 0.

    def gather_inventories(self) -> tuple[list[RankInventory], list[str]]:
        """All ranks' inventories, and what is wrong with them."""
        own = self._take_own_inventory()
        answers = self.collect(self.topology.worker_ranks)
        ranks = [own, *(RankInventory.from_dict(answers[rank]) for rank in sorted(answers))]
        return ranks, find_misfits(ranks, self.topology)

    def order(self, order: dict[str, Any]) -> None:
        """Tell every worker what comes next."""
        self.control.publish(json.dumps(order).encode())

    def run_step(
        self, title: str, ranks: Iterable[int], own: Callable[[], None] | None = None, **order: Any
    ) -> dict[int, dict[str, Any]]:
        """Let some ranks do a step; returns their reports by rank.

        Args:
            title: for people.
            ranks: workers.
            own: rank 0's part in it; it may wait for the others.
            order: what the ranks are told.

        Raises:
            RankFailedError: a rank failed, or did not report in time.
        """
        self.start_step(title, ranks, **order)
        if own is not None:
            own()
        return self.collect(ranks)

    def start_step(self, title: str, ranks: Iterable[int], **order: Any) -> None:
        """Let some ranks begin a step."""
        self.begin(title)
        self.order({**order, "title": title, "ranks": sorted(ranks)})

    def collect(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """One report from each of some ranks.

        Raises:
            RankFailedError: a rank failed, or did not report in time.
        """
        assert self._failures is not None
        waiting, answers = set(ranks), dict[int, dict[str, Any]]()
        while waiting:
            report = self._failures.collect(self.control)
            answers[report.rank] = json.loads(report.payload)
            waiting.discard(report.rank)
        return answers

    def has_failed(self) -> bool:
        """Whether the heartbeat has found a failure; the next `collect` raises it."""
        return isinstance(self._heartbeat, HeartbeatServer) and self._heartbeat.has_failed()

    # Other ranks.

    def send_inventory(self) -> None:
        """Give rank 0 what this rank knows."""
        self.send(self._take_own_inventory().to_dict())

    def send(self, result: dict[str, Any]) -> None:
        """Report to rank 0."""
        self.control.report(json.dumps(result).encode())
        self._activity.start(Phase.CHECKED)

    def next_order(self) -> dict[str, Any]:
        """What rank 0 wants next, as long as it is there."""
        while (order := self.control.receive(timeout=None)) is None:
            if self.control.is_shut_down:
                return {"step": "end", "ok": False}
        return dict(json.loads(order))

    # All ranks.

    def open_groups(self) -> None:
        """Open the communicators that a run would open. Collective."""
        slot = self.topology.slot(self.rank)
        device = device_of(slot) if slot is not None else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.groups = open_groups(self.world, self.topology, device, self._may_spin)

    def _take_own_inventory(self) -> RankInventory:
        inventory = take_inventory(
            self._spec, self.rank, self.begin, is_thorough=self._is_thorough, looks_at_device=self._looks_at_devices
        )
        logger.info("%s", ", ".join(f"{name} {version}" for name, version in inventory.versions.items()))
        for problem in inventory.problems:
            logger.info("problem: %s", problem)
        return inventory
