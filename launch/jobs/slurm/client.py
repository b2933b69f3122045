"""Slurm's programs, called with lists of words and read through their machine formats: submit, look up, signal, end.

It knows what Slurm says of a job. It does not know scripts (script.py), logs (follow.py) or configurations.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.scheduler import BatchState, SchedulerError
from launch.jobs.scheduler import call as call_program
from launch.jobs.slurm.chain import FOLLOWS
from launch.jobs.slurm.script import RECORD

ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States that a job does not leave."""

RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
ENDING = frozenset({"COMPLETING", "STAGE_OUT"})
SEPARATOR = "\x1f"
JOB = re.compile(r"[0-9]+(_[0-9]+)?")
FIELDS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "State", "ReasonList", "exit_code", "RestartCnt", "TimeUsed", "NumNodes",
    "NodeList", "STDOUT", "WorkDir", "Name",
)  # fmt: skip
"""Of squeue; ReasonList is the nodes of a running job, and (REASON) of another."""


class SlurmError(SchedulerError):
    """A program of Slurm is missing or refused; the message holds its own reason."""

    system = "Slurm"


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm says of one job, or of one task of an array.

    Attributes:
        name: of the job.
        number: its own number.
        label: what users call it: the number, or ARRAY_TASK.
        task: number in the array, None outside one.
        state: such as RUNNING.
        reason: why it waits or why it ended; empty where there is none.
        wait_status: of the batch script, as waitpid gives it.
        restarts: how often it was requeued.
        elapsed: running time of this start, as Slurm writes it.
        num_nodes: nodes it has or wants.
        nodes: their names, compressed; empty while it has none.
        log: the file of its output, None where Slurm does not tell it any more.
    """

    name: str
    number: int
    label: str
    task: int | None
    state: str
    reason: str
    wait_status: int
    restarts: int
    elapsed: str
    num_nodes: str
    nodes: str
    log: Path | None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in ENDED

    @property
    def is_running(self) -> bool:
        """Whether its script runs."""
        return self.state in RUNNING

    @property
    def is_ending(self) -> bool:
        """Whether its script has ended, and its nodes are being cleaned."""
        return self.state in ENDING

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue, for the first time or again."""
        return not (self.is_running or self.is_ending or self.has_ended)

    @property
    def exit_status(self) -> int:
        """The exit status that stands for its end: the script's own where it ended by itself."""
        if self.state == "COMPLETED":
            return ExitCode.DONE
        if os.WIFEXITED(self.wait_status) and self.wait_status:
            return os.WEXITSTATUS(self.wait_status)
        if os.WIFSIGNALED(self.wait_status):
            return status_of_signal(os.WTERMSIG(self.wait_status))
        return ExitCode.FAILED


def submit(script: str, cwd: Path) -> int:
    """Hand a script to sbatch and return the job's number.

    Raises:
        SlurmError: sbatch refused it.
    """
    done = call(["sbatch", "--parsable"], input=script, cwd=cwd)
    match = re.match(r"([0-9]+)", done.stdout.strip())
    if done.returncode or match is None:
        raise SlurmError(f"sbatch refused the job: {describe_failure(done)}")
    return int(match[1])


def find_jobs(job: str) -> list[SlurmJob]:
    """The job, or all tasks of the array, in order.

    Args:
        job: "12", or "12_3" for one task.

    Raises:
        SlurmError: Slurm does not know it (any more).
    """
    check_name(job)
    form = ",".join(f"{name}:{SEPARATOR}" for name in FIELDS)
    done = call(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", f"--Format={form}"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise SlurmError(f"squeue: {describe_failure(done)}")
    jobs = [read_job(line) for line in done.stdout.split("\n") if SEPARATOR in line] or _find_in_accounts(job)
    if not jobs:
        raise SlurmError(f"Slurm does not know a job {job}: it forgets jobs some minutes after their end; see its log")
    return sorted(jobs, key=lambda item: item.task or 0)


def read_job(line: str) -> SlurmJob:
    """One line of squeue with FIELDS."""
    values = dict(zip(FIELDS, (text.strip() for text in line.split(SEPARATOR)), strict=False))
    task = int(values["ArrayTaskID"]) if values["ArrayTaskID"].isdecimal() else None
    number, array = int(values["JobID"]), values["ArrayJobID"]
    reason = values["ReasonList"]
    patterns = {"j": str(number), "A": array, "a": values["ArrayTaskID"], "x": values["Name"], "%": "%"}
    log = re.sub(r"%([jAax%])", lambda match: patterns[match[1]], values["STDOUT"])
    return SlurmJob(
        name=values["Name"],
        number=number,
        label=str(number) if task is None else f"{array}_{task}",
        task=task,
        state="RUNNING" if values["State"] == "SIGNALING" else values["State"],  # for a moment, by our own scancel
        reason=reason[1:-1] if reason.startswith("(") and reason != "(None)" else "",
        wait_status=int(values["exit_code"] or 0),
        restarts=int(values["RestartCnt"] or 0),
        elapsed=values["TimeUsed"],
        num_nodes=values["NumNodes"],
        nodes=values["NodeList"],
        log=Path(values["WorkDir"]) / log,
    )


def find_next(number: int) -> list[SlurmJob]:
    """The job that a job of a chain has submitted to follow it, as long as it has not ended; none where there is none.

    Raises:
        SlurmError: Slurm does not answer.
    """
    done = call(["squeue", "--noheader", f"--user={os.getuid()}", "--Format=JobID:20,Comment:80"])
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return [
        job for line in lines if line[1:] and line[1].strip() == f"{FOLLOWS} {number}" for job in find_jobs(line[0])
    ]


def _find_in_accounts(job: str) -> list[SlurmJob]:
    """The job from Slurm's accounting, which knows jobs for longer, where a cluster has one."""
    names = "JobIDRaw,JobID,State,ExitCode,Elapsed,NNodes,NodeList,JobName"
    if shutil.which("sacct") is None:
        return []
    done = call(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", f"--format={names}"])
    jobs = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        number, label, state, status, elapsed, num_nodes, nodes, name = line.split("|", 7)
        code, _, signal = status.partition(":")
        task = label.partition("_")[2]
        jobs.append(
            SlurmJob(
                name=name,
                number=int(number),
                label=label,
                task=int(task) if task.isdecimal() else None,
                state=state.split()[0],  # "CANCELLED by 1000"
                reason="",
                wait_status=int(code) << 8 | int(signal or 0),
                restarts=0,
                elapsed=elapsed,
                num_nodes=num_nodes,
                nodes="" if nodes == "None assigned" else nodes,
                log=None,
            )
        )
    return jobs


def read_record(job: str) -> Mapping[str, object]:
    """What `trtrun submit` wrote into the job's script for later; empty where Slurm has no such script."""
    check_name(job)
    done = call(["scontrol", "write", "batch_script", job, "-"])
    line = next((line for line in done.stdout.splitlines() if line.startswith(RECORD)), None)
    if done.returncode or line is None:
        return {}
    try:
        record = json.loads(line.removeprefix(RECORD))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def recall(job: BatchState) -> BatchState | None:
    """None: Slurm knows a job for long enough after its end."""
    return None


def find_successor(job: BatchState) -> BatchState | None:
    """None: a job that goes on keeps its number."""
    return None


def drain_jobs(jobs: Sequence[BatchState]) -> None:
    """Ask running jobs to end once what is in flight is done.

    Raises:
        SlurmError: scancel refused.
    """
    signal_scripts(jobs, "TERM")


def signal_scripts(jobs: Sequence[BatchState], name: str) -> None:
    """Send a signal to the batch scripts of running jobs, and to nothing else.

    Raises:
        SlurmError: scancel refused.
    """
    _cancel(["--batch", f"--signal={name}", *(item.label for item in jobs)])


def end_jobs(jobs: Sequence[BatchState]) -> None:
    """End jobs at once, or take them out of the queue.

    Raises:
        SlurmError: scancel refused.
    """
    _cancel([item.label for item in jobs])


def check_name(job: str) -> None:
    """Raise SlurmError for what is no job's number."""
    if not JOB.fullmatch(job):
        raise SlurmError(f"{job!r} is no job: write its number, such as 12, or 12_3 for task 3 of an array")


def _cancel(words: Sequence[str]) -> None:
    done = call(["scancel", *words])
    if done.returncode:
        raise SlurmError(f"scancel: {describe_failure(done)}")


def call(words: Sequence[str], input: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs.

    Raises:
        SlurmError: it is not there, or does not come back.
    """
    return call_program(SlurmError, words, input, cwd)


def describe_failure(done: subprocess.CompletedProcess[str]) -> str:
    """What a program said, as one line, without its name before each sentence."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in done.stderr.splitlines()]
    said = "; ".join(dict.fromkeys(line for line in lines if line))
    return said or f"exit status {done.returncode}, without a reason"
