"""How ranks end under an mpirun that goes on without them, read from what it then tells of itself.

Such an mpirun ends nobody and says nothing when a rank is killed. Asked by variables of its environment (`tells` in
flavours.py) it writes lines that are meant for its developers; of these this module keeps the ends of ranks, and the
parent of mpirun ends the job for those that it cannot do without. It does not know what a user is told.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

_TOLD = re.compile(r"\[[^\s\]]+:\d+\] \[prte\S*@0,\d+\]")
"""Begins every line that an mpirun or its daemon writes of itself."""

_PROCESS = r"\[prte\S*@1,(?P<rank>\d+)\]"
_GONE = re.compile(rf"odls:\S+ child process {_PROCESS} pid (?P<process>\d+) terminated")
_SIGNALLED = re.compile(rf"odls:\S+ child process {_PROCESS} terminated with signal (?P<signal>.+)")
_KILLED = re.compile(rf"errmgr:\S+ proc {_PROCESS} aborted by signal")
_FAILED = re.compile(rf"errmgr:\S+ proc {_PROCESS} exited with non-zero status (?P<status>\d+)")
_ABORTED = re.compile(rf"errmgr:\S+ proc {_PROCESS} called abort with exit code (?P<status>-?\d+)")
_NUMBERS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended that did not end well.

    Attributes:
        rank: of the job.
        process: its number on mpirun's own host; 0 where that is not known.
        signal: number of the signal that killed it; 0 where it is not known, as on other hosts.
        status: its exit status; 0 where a signal ended it.
        is_abort: whether the rank has asked mpirun to end the job with this status; it then ends some of the others, or
            none.
    """

    rank: int
    process: int = 0
    signal: int = 0
    status: int = 0
    is_abort: bool = False

    @property
    def is_kill(self) -> bool:
        """Whether a signal ended it."""
        return not self.is_abort and not self.status


@dataclass
class RankEnds:
    """Lines of mpirun in, ends of ranks out.

    Attributes:
        expendable: ranks that the job goes on without.
        fatal: the first end that the job is over with; what comes after it only follows from it.
        forgiven: ends of expendable ranks.
    """

    expendable: frozenset[int] = frozenset()
    fatal: RankEnd | None = None
    forgiven: list[RankEnd] = field(default_factory=list)
    _processes: dict[int, int] = field(default_factory=dict)
    _signals: dict[int, int] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Take a line of stderr; returns whether mpirun told it of itself, and so not to the user."""
        if not _TOLD.match(line):
            return False
        if gone := _GONE.search(line):
            self._processes[int(gone["rank"])] = int(gone["process"])
        elif signalled := _SIGNALLED.search(line):
            self._signals[int(signalled["rank"])] = _NUMBERS.get(signalled["signal"].strip(), 0)
        elif killed := _KILLED.search(line):
            rank = int(killed["rank"])
            self._end(RankEnd(rank, self._processes.get(rank, 0), self._signals.get(rank, 0)))
        elif failed := _FAILED.search(line):
            rank = int(failed["rank"])
            self._end(RankEnd(rank, self._processes.get(rank, 0), status=int(failed["status"])))
        elif aborted := _ABORTED.search(line):
            self._end(RankEnd(int(aborted["rank"]), status=int(aborted["status"]) % 256, is_abort=True))
        return True

    def _end(self, end: RankEnd) -> None:
        if end.rank in self.expendable and not end.is_abort:
            self.forgiven.append(end)
        elif self.fatal is None:
            self.fatal = end
