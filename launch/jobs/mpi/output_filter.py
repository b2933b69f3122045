"""Keeps mpirun's own words from the user, and learns from them which rank was killed and which host was lost.

Open MPI's come in boxes: a line of dashes, some text, a line of dashes. Hydra's are boxes of equals signs on stdout,
and lines that begin with the name of one of its programs. This is what becomes of them:

- A box that tells of a killed rank or a lost host becomes one line.
- What only repeats that a rank has ended the job is dropped, and so is PMIx's error that a peer is gone, libevent's
  that a connection was closed already, and PRRTE's that ssh has left its process group already.
- That others lost their connection to a rank, and Hydra's own errors, wait for the end of the job: they are dropped
  where a line has named the rank or host, and shown as they are where none has.
- That a rank did not reach rank 0 waits, too: it is no news where rank 0 has ended because it was asked to.
- What an mpirun that goes on without ranks tells of itself is taken out (`RankEnds`); the end of a rank that the job
  cannot do without becomes one line.
- Any other box, and every line of a rank, passes unchanged. So do rare lines that harm nobody: warnings of UCX, PMIx
  and ssh, and Hydra's "exit string" on stdout.

It does not know processes or files.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

_TOLD = re.compile(r"\[[^\s\]]+:\d+\] \[prte\S*@0,\d+\]")
"""Begins every line that an mpirun or its daemon writes of itself."""

_PROCESS = r"\[prte\S*@1,(?P<rank>\d+)\]"
_GONE = re.compile(rf"odls:\S+ child process {_PROCESS} pid (?P<process>\d+) terminated")
_SIGNALLED = re.compile(rf"odls:\S+ child process {_PROCESS} terminated with signal (?P<signal>.+)")
_ENDED_BY_SIGNAL = re.compile(rf"errmgr:\S+ proc {_PROCESS} aborted by signal")
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
        elif killed := _ENDED_BY_SIGNAL.search(line):
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


EDGE_LENGTH = 60
LONGEST_BOX_LINES = 40

_PROGRAM = r"(?:prterun|mpirun|mpiexec|prte|orterun)"
_KILLED = re.compile(
    rf"{_PROGRAM} noticed that process rank (?P<rank>\d+) with PID (?P<process>\d+) on node (?P<host>\S+) "
    r"exited\s+on\s+signal (?P<signal>\d+)"
)
_TERMINATED = re.compile(
    r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES.*"
    r"PID \d+ RUNNING AT (?P<host>\S+).*EXIT CODE: (?P<signal>[1-9]|[1-5]\d|6[0-4])\b"
)
_LOST = re.compile(r"has lost communication with a remote daemon.* on node \S+ .*on node (?P<host>\S+)")
_REPEATED_BOX = re.compile(
    rf"MPI_ABORT was invoked on rank|{_PROGRAM} has exited due to process rank|Primary job\s+terminated normally, but"
    rf"|{_PROGRAM} detected that one or more processes exited with non-zero|{_PROGRAM}: abort is already in progress"
)
_REPEATED_LINE = re.compile(
    r"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort"
    r"|(?:\[[^\s\]]+:\d+\] )?(?:Delaying for \d+ seconds? before aborting|PMIX ERROR: PMIX_ERR_UNREACH in file"
    r"|pmix_ptl_base: send_msg: write failed: "
    r"|plm:(?:ssh|rsh): Warning: setpgid\(\d+,\d+\) failed in parent"  # ssh was quicker, and has done it itself
    r"|Set MCA parameter \"\w+help_aggregate\""
    r"|Abort is in progress\.\.\.hit ctrl-c again"
    r"|\d+ more process(?:es)? ha(?:s|ve) sent help message help-)"
    r"|\[warn\] Epoll (?:ADD|MOD|DEL)\(\d+\) on fd \d+ failed"
)
_WAITING_BOX = re.compile(r"MPI communication peer process has unexpectedly disconnected")
_WAITING_LINE = re.compile(r"\[(?:mpiexec|proxy:\d+(?::\d+)?)@[^\s\]]+\] ")
_MPI_ERROR = re.compile(r"\[[^\s\]]+:\d+\] \*\*\* (?P<closed>An error occurred in Socket closed)?")
_LEFT_ALONE = re.compile(r"trtrun: .* failed: HeartbeatError: host \S+ has no TCP connection to rank 0 ")
_FAILURE = re.compile(r"trtrun: [a-z+]+ rank \d+ \([^)]*\) (?:failed: |was killed by signal )")


@dataclass
class OutputFilter:
    """A stream of stderr text in, the same without mpirun's words out; and stdout, of which Hydra writes some.

    Attributes:
        describe: names a rank, such as "target rank 2 (cpu:1)".
        is_expected: the job is being ended, so that killed ranks and lost connections are no news.
        said_something: whether a rank, or this filter, has said anything.
        killed: (rank, signal number) of ranks that ended by a signal, as mpirun noticed them; a rank that is not known
            is -1.
        lost_hosts: hosts that mpirun lost the connection to.
        ends: how ranks end, where mpirun goes on without them; None where it ends the job for them.
    """

    describe: Callable[[int], str]
    is_expected: bool = False
    said_something: bool = False
    killed: list[tuple[int, int]] = field(default_factory=list)
    lost_hosts: list[str] = field(default_factory=list)
    ends: RankEnds | None = None
    _news: str = ""
    _waiting: str = ""
    _left_alone: str = ""
    _is_in_closed: bool = False
    _has_told_failure: bool = False

    def __post_init__(self) -> None:
        # A line that still grows waits only while it could be mpirun's: progress bars must move.
        self._errors = _Boxes("-", re.compile(r"[-\[A\d][^\r]*$"), self._take_box, self._take_line)
        self._output = _Boxes("=", re.compile(r"=+$"), self._take_hydras_box)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has said that it ends the job, or mpirun that it has lost a host."""
        return self._has_told_failure or bool(self.lost_hosts) or bool(self._left_alone)

    @property
    def fatal_end(self) -> RankEnd | None:
        """The end of a rank that the job is over with, where mpirun does not see to that."""
        return self.ends.fatal if self.ends is not None else None

    def feed(self, text: str) -> str:
        """Take a piece of stderr, which may end anywhere; return what may be shown now."""
        return self._say(self._errors.feed(text.replace("\0", "")))  # mpirun ends an abort with a stray NUL

    def feed_output(self, data: bytes) -> bytes:
        """Take a piece of stdout; return what is not Hydra's, byte by byte as it was."""
        return self._output.feed(data.decode("latin-1")).encode("latin-1")

    def flush(self) -> str:
        """Return what is held back: the stream paused, so it was no box. Also what stdout made known."""
        news, self._news = self._news, ""
        return self._say(news + self._errors.flush())

    def flush_output(self) -> bytes:
        """Return what of stdout is held back: it paused or ended."""
        return self._output.flush().encode("latin-1")

    def finish(self) -> str:
        """Return all that is held back: the job has ended."""
        text = self.flush()
        if self.is_expected:
            return text
        if not (self.killed or (self.ends is not None and self.ends.forgiven) or self.has_failed):
            text += self._waiting
        return self._say(text + self._left_alone)

    def _say(self, text: str) -> str:
        self.said_something = self.said_something or bool(text.strip())
        return text

    def _take_box(self, box: str) -> str | None:
        body = " ".join(box.splitlines()[1:-1])
        if self.is_expected:
            return ""
        if killed := _KILLED.search(body):
            return self._tell_killed(int(killed["rank"]), int(killed["process"]), killed["host"], int(killed["signal"]))
        if lost := _LOST.search(body):
            self.lost_hosts.append(lost["host"])
            if self._has_told_failure:  # the heartbeat has named the host's ranks
                return ""
            return f"trtrun: mpirun lost the connection to host {lost['host']}; the job ends\n"
        if _WAITING_BOX.search(body):
            self._waiting += box
            return ""
        return "" if _REPEATED_BOX.search(body) else None

    def _take_line(self, line: str) -> bool:
        if _LEFT_ALONE.match(line):
            self._left_alone += line + "\n"
            return True
        if self.ends is not None and self.ends.take(line):
            end = self.fatal_end
            if end is not None and end.is_kill and not self.killed and not self.is_expected:
                self._news += self._tell_killed(end.rank, end.process, socket.gethostname(), end.signal)
            return True
        self._has_told_failure = self._has_told_failure or _FAILURE.match(line) is not None
        error = _MPI_ERROR.match(line)
        self._is_in_closed = error is not None and (self._is_in_closed or error["closed"] is not None)
        if self._is_in_closed or _WAITING_LINE.match(line):
            self._waiting += line + "\n"
            return True
        return _REPEATED_LINE.match(line) is not None

    def _take_hydras_box(self, box: str) -> str | None:
        ended = _TERMINATED.search(" ".join(line.lstrip("= ") for line in box.splitlines()))
        if ended is None:
            return None
        if not self.is_expected:  # it kills the other ranks of the host at once, and names any one of them all
            self._news += self._tell_killed(-1, 0, ended["host"], int(ended["signal"]))
        return ""

    def _tell_killed(self, rank: int, process: int, host: str, number: int) -> str:
        self.killed.append((rank, number or signal.SIGKILL))
        name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
        who = self.describe(rank) if rank >= 0 else "a rank"
        if not number:  # of another host, of which mpirun tells no more
            return f"trtrun: {who} was killed by a signal\n"
        where = f"process {process} on {host}" if process else f"on {host}"  # Open MPI 4 and Hydra do not tell it
        return f"trtrun: {who} was killed by signal {number} ({name}), {where}\n"


@dataclass
class _Boxes:
    """Lines and boxes of one stream, and what of them is shown.

    Attributes:
        character: of the lines above and below a box.
        growing: matches a line without its end that may become mpirun's.
        take_box: returns what is shown in place of a box, or None for one that is not mpirun's.
        take_line: returns whether a line outside boxes is mpirun's.
    """

    character: str
    growing: re.Pattern[str]
    take_box: Callable[[str], str | None]
    take_line: Callable[[str], bool] = lambda line: False
    _box: str = ""
    _partial: str = ""

    def feed(self, text: str) -> str:
        """Take a piece of the stream, which may end anywhere; return what may be shown now."""
        *lines, self._partial = (self._partial + text).split("\n")
        shown = "".join(self._feed_line(line) for line in lines)
        if not self._box and not self.growing.match(self._partial):
            shown, self._partial = shown + self._partial, ""
        return shown

    def flush(self) -> str:
        """Return what is held back."""
        text, self._box, self._partial = self._box + self._partial, "", ""
        return text

    def _feed_line(self, line: str) -> str:
        is_edge = line.startswith(self.character * EDGE_LENGTH)
        if not self._box and not is_edge:
            return "" if self.take_line(line) else line + "\n"
        is_whole = is_edge and bool(self._box)
        self._box += line + "\n"
        if not is_whole and self._box.count("\n") <= LONGEST_BOX_LINES:
            return ""
        box, self._box = self._box, ""
        shown = self.take_box(box) if is_whole else None
        return box if shown is None else shown
