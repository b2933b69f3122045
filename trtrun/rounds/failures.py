"""How the failure of a rank reaches the orchestrator's main thread: as one RankFailedError, wherever it waits.

The heartbeat's thread finds failures (`parallel.watchdog.heartbeat_server`); here the main thread takes them. It does
not know what a failure is. Ranks that the job can do without are no failure: their loss is told once, as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from parallel import abort
from parallel.control import ControlPlane, Report
from parallel.watchdog.activity import Doing
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.errors import RankFailedError

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
        """The same; None where none came in time, or a rank was lost.

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
