"""How the failure of a rank reaches the orchestrator's main thread: as one RankFailedError, wherever it waits.

The heartbeat's thread finds failures (`parallel.watchdog.heartbeat_server`); here the main thread takes them. It does
not know what a failure is.
"""

from __future__ import annotations

from contextlib import suppress

from parallel import abort
from parallel.control import ControlPlane, Report
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.errors import RankFailedError


class RankFailures:
    """The orchestrator's view of the heartbeat."""

    def __init__(self, heartbeat: HeartbeatServer) -> None:
        self._heartbeat = heartbeat
        self._error: RankFailedError | None = None

    def check(self) -> None:
        """Raise RankFailedError, the same one each time, once a rank has failed. Cheap until then."""
        if self._error is None and (failure := self._heartbeat.take_failure()) is not None:
            self._error = RankFailedError(failure.line)
            if failure.stacks:
                self._error.add_note(failure.stacks.rstrip())
            # MPI's own end would wait for the other ranks, which hang.
            abort.abort_at_exit()
        if self._error is not None:
            raise self._error

    def collect(self, control: ControlPlane) -> Report:
        """Wait for the next report of any worker.

        Raises:
            RankFailedError: a rank failed.
        """
        while True:
            report = control.collect(timeout=None, until=self._heartbeat.has_failed)
            if report is not None:
                return report
            self.check()

    def close(self, control: ControlPlane) -> None:
        """Let the workers end and watch no longer. After a failure nobody is waited for."""
        if self._error is not None:
            return
        if not self._heartbeat.has_failed():
            control.shut_down(until=self._heartbeat.has_failed)
        if not self._heartbeat.has_failed():
            self._heartbeat.close()
        with suppress(RankFailedError):
            self.check()
        if self._error is not None:
            # All that was asked for is done, so this is no error of the program's; its exit status is one all the same.
            abort.say(f"trtrun: {self._error}\n")
