"""What the commands need of a batch system, and how its programs are called.

The modules `launch.jobs.slurm.client` and `launch.jobs.pbs.client` are such batch systems. This one knows none of them,
nor scripts, nor what a job needs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from trtrun.errors import TrtrunError

WAIT_SECONDS = 60.0
"""How long one of the programs may take: a busy server answers late, a dead one never."""


class SchedulerError(TrtrunError):
    """A program of a batch system is missing or refused; the message holds its own reason.

    Attributes:
        system: name of the batch system.
    """

    system = "the batch system"


@dataclass(frozen=True, kw_only=True)
class BatchState(ABC):
    """What a batch system says of one job, or of one task of an array.

    Attributes:
        name: of the job.
        number: its own number.
        label: what users call it: the number, or that of an array and its task.
        task: number in the array, None outside one.
        state: such as RUNNING.
        reason: why it waits or why it ended; empty where there is none.
        restarts: how often it was requeued.
        elapsed: running time of this start, as the batch system writes it.
        num_nodes: nodes it has or wants.
        nodes: their names; empty while it has none.
        log: the file of its output, None where the batch system does not tell it any more.
    """

    name: str
    number: int
    label: str
    task: int | None
    state: str
    reason: str
    restarts: int
    elapsed: str
    num_nodes: str
    nodes: str
    log: Path | None

    ended_states: ClassVar[frozenset[str]]
    running_states: ClassVar[frozenset[str]]
    ending_states: ClassVar[frozenset[str]]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in self.ended_states

    @property
    def is_running(self) -> bool:
        """Whether its script runs."""
        return self.state in self.running_states

    @property
    def is_ending(self) -> bool:
        """Whether its script has ended, and its nodes are being cleaned."""
        return self.state in self.ending_states

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue, for the first time or again."""
        return not (self.is_running or self.is_ending or self.has_ended)

    @property
    @abstractmethod
    def exit_status(self) -> int:
        """The exit status that stands for its end: the script's own where it ended by itself."""


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


@dataclass(frozen=True)
class GpuRequest:
    """GPUs that a section asks for by itself.

    Attributes:
        key: in the section.
        value: its value, for messages.
        count: GPUs of each node.
        example: how as many as `{}` are written.
    """

    key: str
    value: str
    count: int
    example: str


class BatchSection(Protocol):
    """What the sections of all batch systems have, each in the words of its own."""

    place_in_file: ClassVar[str]
    """Where it stands in the file."""

    @property
    def job_name(self) -> str:
        """The job's name."""

    @property
    def nodes(self) -> int | None:
        """Nodes to ask for; None: what the devices need."""

    @property
    def cpus_per_task(self) -> int | None:
        """CPU cores of each rank."""

    @property
    def gpu_request(self) -> GpuRequest | None:
        """GPUs of each node; None: what the devices need."""

    @property
    def takes_whole_nodes(self) -> bool:
        """Whether no other job runs on the nodes."""

    @property
    def requeue(self) -> bool:
        """Whether a job that was drained goes on by itself."""

    @property
    def signal_seconds(self) -> int:
        """How long before its time limit the job is warned."""

    @property
    def extra(self) -> tuple[str, ...]:
        """Further options of the program that submits."""


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


def tell(error: type[SchedulerError], words: Sequence[str]) -> None:
    """Run a program that has nothing to answer.

    Raises:
        SchedulerError: of that class: it failed.
    """
    done = call(error, words)
    if done.returncode:
        raise error(f"{words[0]}: {describe_failure(done)}")


def describe_failure(done: subprocess.CompletedProcess[str]) -> str:
    """What a program said, as one line, without its name before each sentence, and without its usage."""
    lines = [line.strip() for line in done.stderr.partition("\nusage:")[0].splitlines()]
    said = "; ".join(dict.fromkeys(re.sub(r"^[a-z_]+: (error: |fatal: )?", "", line) for line in lines if line))
    return said or f"exit status {done.returncode}, without a reason"
