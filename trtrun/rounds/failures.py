"""What the failure of a rank means.

It reaches the orchestrator's main thread as one RankFailedError, wherever that waits. Whether a job goes on when it
loses its draft ranks, and why not, has one answer for all who start, run and check it: the functions below the class.
It knows the heartbeat and the topology. It does not know rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from parallel import abort
from parallel.mpi_rank import outlives_ranks
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import RankFailedError

if TYPE_CHECKING:  # commands import this module for its functions, and start no heartbeat
    from parallel.control import ControlPlane, Report
    from parallel.watchdog.activity import Doing
    from parallel.watchdog.heartbeat_server import HeartbeatServer

logger = logging.getLogger(__name__)


class RankFailures:
    """The orchestrator's view of the heartbeat.

    Attributes:
        lost_ranks: world ranks that the job goes on without, as far as `check` and `collect` have noticed.
    """

    def __init__(self, heartbeat: HeartbeatServer, control: ControlPlane | None = None) -> None:
        """Look at the heartbeat.

        Args:
            heartbeat: the watch over all workers.
            control: what forgets ranks that are lost; None where the job can lose none.
        """
        self.lost_ranks: frozenset[int] = frozenset()
        self._heartbeat = heartbeat
        self._control = control
        self._error: RankFailedError | None = None

    def check(self) -> None:
        """Raise RankFailedError, the same one each time, once a rank has failed. Cheap until then.

        Notices lost ranks, too: the control plane forgets them, and one warning says so.
        """
        loss = self._heartbeat.loss
        if loss is not None and not self.lost_ranks:
            self.lost_ranks = frozenset(loss.ranks)
            if self._control is not None:
                self._control.forget(loss.ranks)
            logger.warning("%s; the job goes on without drafts", loss.line)
        if self._error is None and (failure := self._heartbeat.take_failure()) is not None:
            self._error = RankFailedError(failure.line)
            if failure.stacks:
                self._error.add_note(failure.stacks.rstrip())
            # MPI's own end would wait for the other ranks, which hang.
            abort.abort_at_exit()
        if self._error is not None:
            raise self._error

    def look(self) -> Mapping[int, Doing]:
        """What each rank is doing, as far as is known, by world ranks. From any thread."""
        return self._heartbeat.look()

    def collect(self, control: ControlPlane) -> Report:
        """Wait for the next report of any worker.

        Raises:
            RankFailedError: a rank failed.
        """
        while True:
            report = self.collect_within(None, control)
            if report is not None:
                return report

    def collect_within(self, seconds: float | None, control: ControlPlane) -> Report | None:
        """Collect a report as `collect` does; None where none came in time, or a rank was lost.

        Raises:
            RankFailedError: a rank failed.
        """
        report = control.collect(timeout=seconds, until=self._has_news)
        if report is None:
            self.check()
        return report

    def close(self, control: ControlPlane) -> None:
        """Let the workers end and watch no longer. After a failure nobody is waited for."""
        if self._error is not None:
            return
        with suppress(RankFailedError):
            self.check()
        if not self._heartbeat.has_failed():
            control.shut_down(until=self._heartbeat.has_failed)
        if not self._heartbeat.has_failed():
            self._heartbeat.close()
        if not self._heartbeat.lost_are_gone:
            abort.abort_at_exit(0)  # MPI's own end would wait for them
        with suppress(RankFailedError):
            self.check()
        if self._error is not None:
            # All that was asked for is done, so this is no error of the program's; its exit status is one all the same.
            abort.say(f"trtrun: {self._error}\n")

    def _has_news(self) -> bool:
        is_lost = self._heartbeat.loss is not None and not self.lost_ranks
        return is_lost or self._heartbeat.has_failed()


def find_obstacle(config: RuntimeConfig, topology: Topology) -> str | None:
    """Why the loss of a draft rank ends the job, whatever its MPI can do; None where it need not."""
    if not topology.draft_ranks:
        return "no rank drafts"
    if set(topology.draft_ranks) & set(topology.target_ranks):
        return "draft and target share a device"
    if config.launch.on_draft_loss == "end":
        return "launch.on_draft_loss is end"
    if not _goes_on_alone(config):
        return "the target waits for the draft in every round"
    return None


def expendable_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks that the job can do without where its MPI outlives ranks: those of the draft, or none."""
    return () if find_obstacle(config, topology) else topology.draft_ranks


def expendable_hosts(config: RuntimeConfig, topology: Topology) -> frozenset[str]:
    """Hosts that the job can do without, too: those that have no other ranks than these."""
    ranks = expendable_ranks(config, topology)
    others = {topology.host(rank) for rank in range(topology.world_size) if rank not in ranks}
    return frozenset(topology.host(rank) for rank in ranks) - others


def unawaited_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks without which rounds go on, lost or not: those of a draft that the target does not wait for."""
    return topology.draft_ranks if _goes_on_alone(config) else ()


def losable_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks that this job, as it was started, goes on without. On a rank of it."""
    return expendable_ranks(config, topology) if outlives_ranks() else ()


def describe_draft_loss(config: RuntimeConfig, topology: Topology) -> tuple[str, str] | None:
    """What the loss of a draft rank does to this job, as it was started. On a rank of it.

    Returns:
        "continue" or "end", and the reason for an end; None where there is no draft rank.
    """
    if not topology.draft_ranks:
        return None
    obstacle = find_obstacle(config, topology)
    if obstacle is None and not outlives_ranks():
        obstacle = "its MPI ends with any rank; Open MPI 5 with ULFM would go on"
    return ("end", obstacle) if obstacle else ("continue", "")


def _goes_on_alone(config: RuntimeConfig) -> bool:
    """Whether the target ranks of this job go on with plain steps where no draft comes."""
    return config.drafts_apart and not config.speculation.use_logits
