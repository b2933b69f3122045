"""Keeps mpirun's own boxes of text from the user, and learns from them which rank was killed.

A box is a line of dashes, some text, a line of dashes. Boxes that only repeat what the ranks said or what trtrun says
better are dropped; any other box, and every line of a rank, passes unchanged. It does not know processes or files.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

DASHES = "-" * 60
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
    rf"{_PROGRAM} noticed that process rank (\d+) with PID (\d+) on node (\S+) exited\s+on\s+signal (\d+)"
)


@dataclass
class NoiseFilter:
    """A stream of stderr text in, the same without mpirun's boilerplate out.

    Attributes:
        describe: names a rank, such as "target rank 2 (cpu:1)".
        said_something: whether a rank, or this filter, has said anything.
        killed: (rank, signal number) of ranks that ended by a signal, as mpirun noticed them.
    """

    describe: Callable[[int], str]
    said_something: bool = False
    killed: list[tuple[int, int]] = field(default_factory=list)
    _partial: str = ""
    _box: list[str] | None = None

    def feed(self, text: str) -> str:
        """Take a piece of the stream, which may end anywhere; return what may be shown now."""
        shown: list[str] = []
        # mpirun ends an abort with a stray NUL.
        lines = (self._partial + text.replace("\0", "")).split("\n")
        self._partial = lines.pop()
        for line in lines:
            shown.append(self._take_line(line))
        # A line still growing waits only while it could open a box, or inside one: progress bars must move.
        if self._partial and self._box is None and not _may_open_box(self._partial):
            shown.append(self._partial)
            self._partial = ""
            self.said_something = True
        return "".join(shown)

    def flush(self) -> str:
        """Return what is held back: the stream paused or ended, so it was no box."""
        lines = self._box or []
        self._box = None
        text = "".join(line + "\n" for line in lines) + self._partial
        self._partial = ""
        self.said_something = self.said_something or bool(text.strip())
        return text

    def _take_line(self, line: str) -> str:
        dashes = line.rstrip("\r").startswith(DASHES)
        if self._box is None:
            if dashes:
                self._box = [line]
                return ""
            self.said_something = self.said_something or bool(line.strip())
            return line + "\n"
        self._box.append(line)
        if dashes:
            return self._close_box()
        return self.flush() if len(self._box) > LONGEST_BOX_LINES else ""

    def _close_box(self) -> str:
        body = " ".join(self._box[1:-1]) if self._box else ""
        killed = _KILLED.search(body)
        if killed:
            self._box = None
            return self._tell_killed(int(killed[1]), int(killed[2]), killed[3], int(killed[4]))
        if _BOILERPLATE.search(body):
            self._box = None
            return ""
        return self.flush()

    def _tell_killed(self, rank: int, process: int, host: str, number: int) -> str:
        self.said_something = True
        self.killed.append((rank, number))
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "unknown"
        return f"trtrun: {self.describe(rank)} was killed by signal {number} ({name}), process {process} on {host}\n"


def _may_open_box(text: str) -> bool:
    return set(text) == {"-"}
