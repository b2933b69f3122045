"""Keeps mpirun's own words from the user, and learns from them which rank was killed and which host was lost.

Open MPI's come in boxes: a line of dashes, some text, a line of dashes. Hydra's are boxes of equals signs on stdout,
and lines that begin with the name of one of its programs. What only repeats what the ranks said, or what trtrun says
better, is dropped; any other box, and every line of a rank, passes unchanged. It does not know processes or files.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

DASHES = "-" * 60
EQUALS = b"=" * 60
LONGEST_BOX_LINES = 40

_PROGRAM = r"(?:prterun|mpirun|mpiexec|prte|orterun)"
_BOILERPLATE = re.compile(
    r"MPI_ABORT was invoked on rank"
    rf"|{_PROGRAM} has exited due to process rank"
    rf"|{_PROGRAM} detected that one or more processes exited with non-zero status"
    r"|Primary job\s+terminated normally, but"
    rf"|{_PROGRAM}: abort is already in progress"
)
_KILLED = re.compile(
    rf"{_PROGRAM} noticed that process rank (?P<rank>\d+) with PID (?P<process>\d+) on node (?P<host>\S+) "
    r"exited\s+on\s+signal (?P<signal>\d+)"
)
_TERMINATED = re.compile(
    r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES.*"
    r"PID \d+ RUNNING AT (?P<host>\S+).*EXIT CODE: (?P<signal>[1-9]|[1-5]\d|6[0-4])\b"
)
_LOST = re.compile(r"has lost communication with a remote daemon.* on node \S+ .*on node (?P<host>\S+)")
_DISCONNECTED = re.compile(
    r"MPI communication peer process has unexpectedly disconnected.*"
    r"Local host: (?P<here>\S+).*Peer host: +(?P<there>\S+)"
)
_TRIVIA = re.compile(
    r"\[[^\s\]]+:\d+\] (?:Delaying for \d+ seconds? before aborting|plm:ssh: Warning: setpgid|PMIX ERROR: PMIX_ERR_)"
    r"|(?:\[[^\s\]]+:\d+\] )?\d+ more process(?:es)? ha(?:s|ve) sent help message help-"
    r"|\[[^\s\]]+:\d+\] Set MCA parameter \"\w+help_aggregate\""
    r"|\[\d+\.\d+\] \[\S+ *:\d+\] +\S+ +UCX +WARN +unexpected tag-receive descriptor"
    r"|Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort"
    r"|Killed by signal 15\.\s*$"  # said by the ssh below mpirun
)
_INTERNAL = re.compile(r"\[(?:mpiexec|proxy:\d+(?::\d+)?)@[^\s\]]+\] ")
"""Hydra's own errors. They may be all there is to be read of what went wrong."""

_SOCKET_CLOSED = re.compile(r"\[[^\s\]]+:\d+\] \*\*\* An error occurred in Socket closed")
_MPI_ERROR = re.compile(r"\[[^\s\]]+:\d+\] \*\*\* ")
_EDGE = re.compile(rb"=+$")
_EXIT_STRING = re.compile(
    rb"\[mpiexec@|YOUR APPLICATION TERMINATED WITH THE EXIT STRING: "
    rb"|This typically refers to a problem with your application\."
    rb"|Please see the FAQ page for debugging suggestions"
)
_FAILURE = re.compile(r"trtrun: [a-z+]+ rank \d+ \([^)]*\) (?:failed: |was killed by signal )")


@dataclass
class OutputFilter:
    """A stream of stderr text in, the same without mpirun's boilerplate out; and stdout, of which Hydra writes some.

    Attributes:
        describe: names a rank, such as "target rank 2 (cpu:1)".
        is_expected: the job is being ended, so that killed ranks and lost connections are no news.
        said_something: whether a rank, or this filter, has said anything.
        killed: (rank, signal number) of ranks that ended by a signal, as mpirun noticed them; a rank that is not known
            is -1.
        lost_hosts: hosts that mpirun lost the connection to.
    """

    describe: Callable[[int], str]
    is_expected: bool = False
    said_something: bool = False
    killed: list[tuple[int, int]] = field(default_factory=list)
    lost_hosts: list[str] = field(default_factory=list)
    _partial: str = ""
    _box: list[str] | None = None
    _output: _StdoutFilter = field(init=False)
    _news: str = ""
    _is_in_error: bool = False
    _has_told_failure: bool = False
    _disconnected: tuple[str, str] | None = None
    _dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._output = _StdoutFilter(self._take_termination)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has said that it ends the job, or mpirun that it has lost a host."""
        return self._has_told_failure or bool(self.lost_hosts)

    def feed(self, text: str) -> str:
        """Take a piece of stderr, which may end anywhere; return what may be shown now."""
        shown: list[str] = []
        # mpirun ends an abort with a stray NUL.
        lines = (self._partial + text.replace("\0", "")).split("\n")
        self._partial = lines.pop()
        for line in lines:
            shown.append(self._take_line(line))
        # A line still growing waits only while it could be mpirun's: progress bars must move.
        if self._partial and self._box is None and not _may_be_noise(self._partial):
            shown.append(self._partial)
            self._partial = ""
            self.said_something = True
        return "".join(shown)

    def feed_output(self, data: bytes) -> bytes:
        """Take a piece of stdout; return what is not Hydra's, byte by byte as it was."""
        return self._output.feed(data)

    def flush(self) -> str:
        """Return what is held back: the stream paused, so it was no box. Also what stdout made known."""
        lines = self._box or []
        self._box = None
        text = self._news + "".join(line + "\n" for line in lines) + self._partial
        self._news = self._partial = ""
        self.said_something = self.said_something or bool(text.strip())
        return text

    def finish(self) -> str:
        """Return what is held back, and what follows from all that was said: the job has ended."""
        text = self.flush()
        conclusions = []
        if not self.killed and not self._has_told_failure and not self.is_expected:
            if self._disconnected is not None and not self.lost_hosts:
                here, there = self._disconnected
                conclusions.append(f"trtrun: a rank on {there} is gone: a rank on {here} lost its connection to it\n")
            if self._dropped and not self.said_something:
                conclusions += self._dropped
        self.said_something = self.said_something or bool(conclusions)
        return text + "".join(conclusions)

    def flush_output(self) -> bytes:
        """Return what of stdout is held back: it paused or ended."""
        return self._output.flush()

    def _take_line(self, line: str) -> str:
        dashes = line.rstrip("\r").startswith(DASHES)
        if self._box is None:
            if dashes:
                self._box = [line]
                return ""
            if self._is_noise(line):
                return ""
            self._has_told_failure = self._has_told_failure or _FAILURE.match(line) is not None
            self.said_something = self.said_something or bool(line.strip())
            return line + "\n"
        self._box.append(line)
        if dashes:
            return self._close_box()
        return self.flush() if len(self._box) > LONGEST_BOX_LINES else ""

    def _is_noise(self, line: str) -> bool:
        """Whether a line outside boxes is mpirun's."""
        if self._is_in_error and _MPI_ERROR.match(line):
            return True
        self._is_in_error = _SOCKET_CLOSED.match(line) is not None
        if self._is_in_error:
            return True
        if _INTERNAL.match(line):
            self._dropped.append(line + "\n")
            return True
        return _TRIVIA.match(line) is not None

    def _close_box(self) -> str:
        body = " ".join(self._box[1:-1]) if self._box else ""
        if self.is_expected:
            self._box = None
            return ""
        if killed := _KILLED.search(body):
            self._box = None
            return self._tell_killed(int(killed["rank"]), int(killed["process"]), killed["host"], int(killed["signal"]))
        if lost := _LOST.search(body):
            self._box = None
            return self._tell_lost(lost["host"])
        if disconnected := _DISCONNECTED.search(body):
            self._box = None
            self._disconnected = (disconnected["here"], disconnected["there"])
            return ""
        if _BOILERPLATE.search(body):
            self._box = None
            return ""
        return self.flush()

    def _take_termination(self, body: str) -> bool:
        """Take in Hydra's box about a process that a signal ended; returns whether it was one."""
        ended = _TERMINATED.search(body)
        if ended is None:
            return False
        # It kills the other ranks of the host at once, and names any one of them all.
        self._news += self._tell_killed(-1, 0, ended["host"], int(ended["signal"]))
        return True

    def _tell_killed(self, rank: int, process: int, host: str, number: int) -> str:
        if self.is_expected:
            return ""
        self.said_something = True
        self.killed.append((rank, number))
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        who = self.describe(rank) if rank >= 0 else "a rank"
        where = f"process {process} on {host}" if process else f"on {host}"  # Open MPI 4 and Hydra do not tell it
        return f"trtrun: {who} was killed by signal {number} ({name}), {where}\n"

    def _tell_lost(self, host: str) -> str:
        """The heartbeat has most likely named the host's ranks before."""
        if not self.is_expected:
            self.lost_hosts.append(host)
        if self._has_told_failure or self.is_expected:
            return ""
        self.said_something = True
        return f"trtrun: mpirun lost the connection to host {host}; the job ends\n"


class _StdoutFilter:
    """Takes Hydra's boxes out of stdout. Everything else passes as it is, at the latest when the stream pauses.

    Args:
        take: takes in the text of a box; returns whether it was Hydra's.
    """

    def __init__(self, take: Callable[[str], bool]) -> None:
        self._take = take
        self._partial = b""
        self._box: list[bytes] | None = None
        self._is_after_box = False

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the stream, which may end anywhere; return what may be shown now."""
        shown: list[bytes] = []
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            shown.append(self._take_line(line))
        if self._box is None and not _EDGE.match(self._partial) and not self._is_after_box:
            shown.append(self._partial)
            self._partial = b""
        return b"".join(shown)

    def flush(self) -> bytes:
        """Return what is held back."""
        data = b"".join(line + b"\n" for line in self._box or ()) + self._partial
        self._box, self._partial = None, b""
        return data

    def _take_line(self, line: bytes) -> bytes:
        is_edge = line.startswith(EQUALS)
        if self._box is None:
            if is_edge:
                self._box = [line]
                return b""
            is_rest = self._is_after_box and _EXIT_STRING.match(line)
            return b"" if is_rest else line + b"\n"
        self._box.append(line)
        if is_edge:
            if self._take(" ".join(part.decode(errors="replace").lstrip("= ") for part in self._box[1:-1])):
                self._box, self._is_after_box = None, True
                return b""
            return self._flush_box()
        return self._flush_box() if len(self._box) > LONGEST_BOX_LINES else b""

    def _flush_box(self) -> bytes:
        data = b"".join(line + b"\n" for line in self._box or ())
        self._box = None
        return data


def _may_be_noise(text: str) -> bool:
    """Whether a line that is not whole yet may turn out to be mpirun's."""
    if set(text) == {"-"} or text[0] == "[" or re.fullmatch(r"\d+(?: (?:m.*)?)?", text):
        return True
    return any(text.startswith(start) or start.startswith(text) for start in ("Abort(", "Killed by"))
