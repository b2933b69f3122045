"""The heartbeat of a training job: each rank says what it does, and one that is silent or stands still ends the job.

Rank 0 trains as well, so it is judged beside the others (`parallel.watchdog.fault_attribution`). A run of one rank has
nobody to wait for, and no heartbeat. It knows how a rank's exceptions reach the user; it does not know how drafters
learn.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from launch.exit_codes import FailedError
from launch.jobs.mpi.job import LAST_WORD_SECONDS
from parallel.control import ControlPlane
from parallel.errors import HeartbeatError, ParallelError
from parallel.mpi_rank import is_lost_peer
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.fault_attribution import CLOSED_SECONDS
from parallel.watchdog.heartbeat import HeartbeatClient, invite_workers, join_heartbeat
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import RankFailedError, TrtrunError
from trtrun.rounds.failures import RankFailures

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

STILL_FACTOR = 10
"""How many times launch.heartbeat_seconds all ranks may stand still. A step is made of pieces, such as one operation on
a large batch or a checkpoint on a slow disk, in which a rank that is well can say nothing new for minutes."""


class TrainingWatch:
    """One rank's part in the watch, as a context around the run: what comes out of it ends the job on every rank.

    Attributes:
        activity: where this rank says what it does.
    """

    def __init__(self, launch: LaunchSection, topology: Topology, world: MPI.Intracomm | None) -> None:
        """Nothing is watched yet.

        Args:
            launch: the limits of time.
            topology: who sits where; every rank has a slot.
            world: all ranks; None for one.
        """
        self.activity = Activity()
        self._launch, self._topology, self._world = launch, topology, world
        self._rank = 0 if world is None else world.Get_rank()
        self._control: ControlPlane | None = None
        self._heartbeat: HeartbeatServer | HeartbeatClient | None = None
        self._failures: RankFailures | None = None

    def join(self) -> None:
        """Join the heartbeat: from here on rank 0 watches the start against its deadline. Collective."""
        if self._world is None:
            return
        limit = self._launch.heartbeat_seconds
        if self._rank == 0:
            seconds = self._launch.start_seconds
            overdue = f"the job has not started within {seconds:g} s (launch.start_seconds)"
            # Before anything collective: a rank that never comes must not keep this one from saying so.
            self._heartbeat = HeartbeatServer(
                self._topology, self.activity, limit, seconds, overdue, still_seconds=STILL_FACTOR * limit
            )
            self._failures = RankFailures(self._heartbeat)
            self._control = ControlPlane(self._world, self._topology)
            invite_workers(self._control, self._topology, self._heartbeat)
        else:
            self._control = ControlPlane(self._world, self._topology)
            try:
                self._heartbeat = join_heartbeat(self._control, self._topology, self.activity, limit)
            except HeartbeatError as error:  # rank 0 waits for this rank
                self._control.abort(f"{type(error).__name__}: {error}")
        self.activity.start(Phase.WEIGHTS)

    def finish_start(self) -> None:
        """Wait, asleep, until every rank has come here; from then on ranks are judged. Collective."""
        if self._control is None:
            return
        self.activity.start(Phase.LOADED)
        self._control.warm_up()
        self._control.close()
        if isinstance(self._heartbeat, HeartbeatServer):
            self._heartbeat.finish_start()

    def __enter__(self) -> TrainingWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the watch.

        Raises:
            RankFailedError: on rank 0, in place of the error: a rank is at fault, this one or another.
            TrtrunError: elsewhere, in place of one that does not say of which rank it is.
        """
        if isinstance(self._heartbeat, HeartbeatServer):
            self._end_server(self._heartbeat, error)
        elif isinstance(self._heartbeat, HeartbeatClient):
            self._end_client(self._heartbeat, error)

    def _end_server(self, heartbeat: HeartbeatServer, error: BaseException | None) -> None:
        heartbeat.close()
        if error is not None and not isinstance(error, Exception):
            return  # an order to end
        assert self._failures is not None
        self._failures.check()
        # What these say is for the user as it is; of others a line is to name the rank.
        if error is not None and not isinstance(error, TrtrunError | ParallelError | OSError):
            failed = RankFailedError(f"{self._topology.describe(0)} failed: {_cause(error)}")
            failed.add_note("".join(traceback.format_exception(error)).rstrip())
            raise failed from error

    def _end_client(self, heartbeat: HeartbeatClient, error: BaseException | None) -> None:
        is_refused = isinstance(error, TrtrunError | ParallelError) and not isinstance(error, FailedError)
        if isinstance(error, Exception) and not is_refused:
            logger.error("this rank failed", exc_info=error, extra={"file_only": True})
            grace = 0.0
            if isinstance(error, FailedError):
                grace = LAST_WORD_SECONDS  # rank 0 most likely says the same
            elif is_lost_peer(error):
                grace = 2 * CLOSED_SECONDS  # the heartbeat is about to name that one
            heartbeat.fail(_cause(error), grace)
        heartbeat.close()
        if is_refused:  # where rank 0 is refused, too, nobody reads this (`print_error`)
            raise TrtrunError(f"{self._topology.describe(self._rank)}: {error}") from error


def _cause(error: BaseException) -> str:
    """An exception as one line."""
    kind = "" if isinstance(error, FailedError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())
