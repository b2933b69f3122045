"""How far each rank is on its way to work, and which one is stuck: marks on stderr that only the parent sees.

A rank says what it is about to do, from its first moment on, before MPI connects it to anything; a thread repeats that,
so that a rank that merely waits for another can be told from one that has stopped. Its last mark is that it has joined
the heartbeat (`parallel.watchdog`), which watches all that comes after. The heartbeat cannot watch what comes before:
workers learn its address and token over MPI, and MPI's start hangs while one rank is missing.

The parent of mpirun takes the marks out of the ranks' stderr and, when the time is over, names those that hold up the
rest; which those are is decided in `parallel.watchdog.fault_attribution`. Where a user's own mpirun started the ranks
nobody reads marks, and none are written. It does not know what the steps mean.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from parallel.mpi_rank import find_mpi_rank
from parallel.watchdog import fault_attribution

STARTED = time.monotonic()
"""When this process began, near enough: commands import this first."""

VARIABLE = "TRTRUN_STEPS"
"""Set to 1 for ranks whose parent reads marks."""

BEAT_SECONDS = 0.5
_MARK = re.compile(r"\x1etrtrun (\d+) (\d+) (\d+) (\S*) ([^\x1e\n]*)\n")
"""Ends with a line break: mpirun hands on whole lines."""
_OPEN = "\x1e"
_LONGEST_MARK = 1000


def has_parent() -> bool:
    """Whether this process is a rank whose parent reads marks."""
    return os.environ.get(VARIABLE) == "1" and find_mpi_rank() is not None


class StartProgress:
    """A rank's side. Does nothing where nobody reads marks.

    Used as a context: the thread that repeats the last mark ends with it.
    """

    def __init__(self) -> None:
        self._place = find_mpi_rank() if has_parent() else None
        self._mark = b""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StartProgress:
        if self._place is not None:
            self._thread = threading.Thread(target=self._repeat, name="steps", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def tell(self, number: int, step: str) -> None:
        """Say what this rank is about to do.

        Args:
            number: grows from step to step. Ranks with a smaller one are behind.
            step: for people.
        """
        if self._place is None:
            return
        text = "".join(character if character.isprintable() else " " for character in step)[:200]
        host = socket.gethostname()
        self._mark = f"\x1etrtrun {self._place.rank} {number} {os.getpid()} {host} {text}\n".encode()
        _write(self._mark)

    def _repeat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            _write(self._mark)

    def tell_expendable(self, ranks: Collection[int]) -> None:
        """Say which ranks the job goes on without from now on: their end is no news for the parent. On rank 0."""
        if ranks:
            self.tell(EXPENDABLE, " ".join(map(str, sorted(ranks))))

    def tell_over(self, status: int) -> None:
        """Say that this rank ends now, and with what status. Of rank 0 it is the job's."""
        if self._place is not None and self._place.rank == 0:
            self.tell(OVER, str(status))


def say_hello() -> None:
    """A rank's first mark, before anything that can hang. It keeps the way to the parent open for later ones."""
    if has_parent():
        StartProgress().tell(fault_attribution.FIRST_STEP, "start of MPI")


DONE = 1_000_000
"""Number of the step of a rank that has no more to tell."""

EXPENDABLE = DONE + 1
"""No step: the mark's text has the ranks that the job goes on without."""

OVER = DONE + 2
"""No step: the mark's text has the status with which rank 0 ends."""


@cache
def _channel() -> int:
    """This process's stderr as it was at first: later it may be led to a log file."""
    return os.dup(2)


def _write(mark: bytes) -> None:
    with suppress(OSError):  # the parent is gone, and so will this process be
        os.write(_channel(), mark)  # short enough for one write, which pipes do not mix with others


@dataclass
class _Rank:
    """What the parent has heard of one rank."""

    number: int
    step: str
    host: str
    process: int
    heard_at: float


@dataclass
class StartWatch:
    """The parent's side: takes marks out of the ranks' stderr, and knows who is stuck.

    Attributes:
        describe: names a rank, such as "target rank 2 (cpu:1)".
        size: ranks of the job.
        seconds: how long they may take to their last step.
        purpose: what takes so long, such as "the check".
        started: when the time began, on `clock`; None for now.
        clock: seconds; for tests.
        is_given_up: whether time was over before every rank was done.
        expendable: ranks that the job goes on without, once it is up.
        status: with which rank 0 has ended; None until then.
    """

    describe: Callable[[int], str]
    size: int
    seconds: float
    purpose: str
    started: float | None = None
    clock: Callable[[], float] = time.monotonic
    is_given_up: bool = False
    expendable: frozenset[int] = frozenset()
    status: int | None = None
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _held: str = ""

    def __post_init__(self) -> None:
        if self.started is None:
            self.started = self.clock()

    def feed(self, text: str) -> str:
        """Take a piece of the ranks' stderr, which may end anywhere; return it without marks."""
        text = _MARK.sub(self._hear, self._held + text)
        start = text.rfind(_OPEN)
        # What may become a mark waits for its end; control characters of anything else do not.
        self._held = text[start:] if start >= 0 and len(text) - start < _LONGEST_MARK else ""
        return text[: len(text) - len(self._held)]

    @property
    def all_are_done(self) -> bool:
        """Whether every rank has told its last step."""
        return sum(rank.number >= DONE for rank in self._ranks.values()) == self.size

    def give_up(self) -> list[str]:
        """Lines that name the stuck ranks, once time is over; none before that, and where every rank is done."""
        assert self.started is not None
        if self.all_are_done or self.clock() - self.started < self.seconds:
            return []
        self.is_given_up = True
        after = f"{self.purpose} was not done after {self.seconds:g} s"
        return [f"{after}: {self._describe(number)}" for number in self.find_stuck()]

    def find_stuck(self) -> list[int]:
        """Ranks that hold up the others, as far as can be told from here."""
        return fault_attribution.find_stuck(
            {number: self._progress(rank) for number, rank in self._ranks.items()}, self.size
        )

    def _progress(self, rank: _Rank) -> fault_attribution.Progress:
        silence = self.clock() - rank.heard_at
        return fault_attribution.Progress(rank.number, silence, rank.number >= DONE, _is_stopped(rank))

    def _hear(self, mark: re.Match[str]) -> str:
        rank, number, process, host, step = mark.groups()
        if int(number) == EXPENDABLE:
            self.expendable = frozenset(int(word) for word in step.split() if word.isdecimal())
            return ""
        if int(number) == OVER:
            self.status = int(step) if step.isdecimal() else None
            return ""
        self._ranks[int(rank)] = _Rank(int(number), step, host, int(process), self.clock())
        return ""

    def _describe(self, number: int) -> str:
        known = self._ranks.get(number)
        if known is None:
            return f"{self.describe(number)} has not begun: nothing was heard of it"
        progress = self._progress(known)
        state = f"silent for {progress.silent_seconds:.0f} s" if progress.is_silent else "alive"
        return (
            f"{self.describe(number)} on {known.host}, process {known.process}, is stuck in the step "
            f"'{known.step}' ({state})"
        )


def _is_stopped(rank: _Rank) -> bool:
    """Whether a process of this host is stopped, as by SIGSTOP or a debugger."""
    if rank.host != socket.gethostname():
        return False
    try:
        fields = Path(f"/proc/{rank.process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] in ("T", "t")
