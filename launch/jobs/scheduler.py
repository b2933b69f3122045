"""What the commands need of a batch system, as protocols, and how its programs are called.

The modules `launch.jobs.slurm.client` and `launch.jobs.pbs.client` are such batch systems. This one knows none of them,
nor scripts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trtrun.errors import TrtrunError

WAIT_SECONDS = 60.0
"""How long one of the programs may take: a busy server answers late, a dead one never."""


class SchedulerError(TrtrunError):
    """A program of a batch system is missing or refused; the message holds its own reason.

    Attributes:
        system: name of the batch system.
    """

    system = "the batch system"


class BatchState(Protocol):
    """What a batch system says of one job, or of one task of an array. Attributes as in `SlurmJob`."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def task(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def elapsed(self) -> str: ...
    @property
    def num_nodes(self) -> str: ...
    @property
    def nodes(self) -> str: ...
    @property
    def log(self) -> Path | None: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def is_ending(self) -> bool: ...
    @property
    def is_waiting(self) -> bool: ...
    @property
    def exit_status(self) -> int: ...


class Scheduler(Protocol):
    """A batch system. Every call may raise `SchedulerError`."""

    def submit(self, script: str, cwd: Path) -> int:
        """Hand a script over; returns the job's number."""

    def find_jobs(self, job: str) -> Sequence[BatchState]:
        """The job, or all tasks of the array, in order."""

    def read_record(self, job: str) -> Mapping[str, object]:
        """What `trtrun submit` wrote down of the job; empty where that is lost."""

    def drain_jobs(self, jobs: Sequence[BatchState]) -> None:
        """Ask running jobs to end once what is in flight is done."""

    def end_jobs(self, jobs: Sequence[BatchState]) -> None:
        """End jobs at once, or take them out of the queue."""

    def recall(self, job: BatchState) -> BatchState | None:
        """How a job ended that is not known any more; None where nothing tells that."""

    def find_next(self, number: int) -> Sequence[BatchState]:
        """The job that has been submitted to follow one of a chain, as long as it has not ended; none where there is
        none."""

    def find_successor(self, job: BatchState) -> BatchState | None:
        """The job that goes on with what an ended one has left; None where none does."""


def call(
    error: type[SchedulerError], words: Sequence[str], input: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of a batch system's programs.

    Args:
        error: what its batch system raises.

    Raises:
        SchedulerError: of that class: it is not there, or does not come back.
    """
    program = shutil.which(words[0])
    name = error.system
    if program is None:
        raise error(f"{words[0]} is not on PATH: this is no machine of a {name} cluster, or {name} is not set up")
    try:
        return subprocess.run(
            [program, *words[1:]],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=WAIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise error(f"{words[0]} did not answer within {WAIT_SECONDS:g} s: is {name}'s server up?") from None
    except OSError as reason:
        raise error(f"{words[0]} cannot be run: {reason.strerror}") from None
