"""Slurm's programs, called with lists of words and read through their machine formats: submit, look up, signal, end.

It knows what Slurm says of a job and of partitions. It does not know scripts (script.py), logs (batch/follow.py) or
configurations.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import override

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.batch.job import parse_record
from launch.jobs.batch.scheduler import BatchState, SchedulerError, call, describe_failure, tell
from launch.jobs.slurm.chain import FOLLOWS
from launch.jobs.slurm.script import RECORD
from launch.jobs.slurm.section import count_gres_gpus

ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States that a job does not leave."""

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


_call = partial(call, SlurmError)
_tell = partial(tell, SlurmError)


@dataclass(frozen=True, kw_only=True)
class SlurmJob(BatchState):
    """What Slurm says of one job, or of one task of an array.

    Attributes:
        wait_status: of the batch script, as waitpid gives it.
    """

    wait_status: int

    ended_states = ENDED
    running_states = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
    ending_states = frozenset({"COMPLETING", "STAGE_OUT"})

    @property
    @override
    def exit_status(self) -> int:
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
    done = _call(["sbatch", "--parsable"], input=script, cwd=cwd)
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
    done = _call(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", f"--Format={form}"])
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
    done = _call(["squeue", "--noheader", f"--user={os.getuid()}", "--Format=JobID:20,Comment:80"])
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return [
        job for line in lines if line[1:] and line[1].strip() == f"{FOLLOWS} {number}" for job in find_jobs(line[0])
    ]


def _find_in_accounts(job: str) -> list[SlurmJob]:
    """The job from Slurm's accounting, which knows jobs for longer, where a cluster has one."""
    names = "JobIDRaw,JobID,State,ExitCode,Elapsed,NNodes,NodeList,JobName"
    if shutil.which("sacct") is None:
        return []
    done = _call(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", f"--format={names}"])
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
    done = _call(["scontrol", "write", "batch_script", job, "-"])
    line = next((line for line in done.stdout.splitlines() if line.startswith(RECORD)), None)
    return parse_record(None if done.returncode or line is None else line.removeprefix(RECORD))


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
    _tell(["scancel", "--batch", "--signal=TERM", *(item.label for item in jobs)])


def end_jobs(jobs: Sequence[BatchState]) -> None:
    """End jobs at once, or take them out of the queue.

    Raises:
        SlurmError: scancel refused.
    """
    _tell(["scancel", *(item.label for item in jobs)])


def check_name(job: str) -> None:
    """Raise SlurmError for what is no job's number."""
    if not JOB.fullmatch(job):
        raise SlurmError(f"{job!r} is no job: write its number, such as 12, or 12_3 for task 3 of an array")


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind in a partition.

    Attributes:
        name: of the partition.
        is_default: whether jobs that name none go there.
        time_limit: as Slurm writes it.
        num_nodes: of this kind.
        gpus: of each node; 0 for none.
        gres: generic resources of each node, as Slurm writes them; empty for none.
    """

    name: str
    is_default: bool
    time_limit: str
    num_nodes: int
    gpus: int
    gres: str

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'}"
        return f"{self.name} ({nodes}{f' of {self.gres}' if self.gres else ''}, up to {self.time_limit})"


def list_partitions() -> list[Partition]:
    """The partitions that are up, in Slurm's order.

    Raises:
        SlurmError: there is no sinfo, or it fails.
    """
    done = _call(["sinfo", "--noheader", "--format=%P|%a|%l|%D|%G"])
    if done.returncode:
        raise SlurmError(f"sinfo failed: {describe_failure(done)}")
    found = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) != 5 or words[1] != "up":
            continue
        name, _, limit, nodes, gres = words
        gres = "" if gres in ("(null)", "N/A") else gres
        count = int(nodes) if nodes.isdecimal() else 0
        gpus = count_gres_gpus(gres) or 0
        found.append(Partition(name.removesuffix("*"), name.endswith("*"), limit, count, gpus, gres))
    return found
