"""PBS's programs, called with lists of words and read through their machine formats: submit, look up, signal, end.

It knows what OpenPBS and PBS Professional say of a job; Torque, whose programs have the same names, is refused. It does
not know scripts (script.py), logs that grow (batch/follow.py) or configurations.

Jobs are looked up by qstat's format of separated values: its JSON cannot be parsed in older versions where a variable
of the job holds a quote or a number that begins with 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from typing_extensions import override

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.batch.job import parse_record
from launch.jobs.batch.scheduler import BatchState, SchedulerError, call, describe_failure, tell
from launch.jobs.pbs.script import END_LINE, NEXT_LINE, RECORD_VARIABLE

SEPARATOR = "\x1f"
JOB = re.compile(r"([0-9]+)(?:\[([0-9]*)\]|_([0-9]+))?(\.[\w.-]+)?")
WORDS = {"B": "RUNNING", "E": "EXITING", "F": "FINISHED", "H": "HELD", "M": "MOVED", "Q": "QUEUED", "R": "RUNNING",
         "S": "SUSPENDED", "T": "MOVING", "U": "SUSPENDED", "W": "WAITING", "X": "FINISHED"}  # fmt: skip
"""A word for each letter of a job's state."""

TERMINATED_SUBSTATE = "91"
"""Of a job that qdel has ended."""

FIRST_SIGNAL_STATUS = 256
"""To which PBS adds the number of the signal that ended a job."""

DRAIN_SIGNAL = "URG"
"""qsig sends a signal to every process of a job's session, and the shell that PBS puts around the batch script would
die of most: nobody minds this one but the script, which waits for it."""

LAST_BYTES = 65536
"""Of a log, in which its last lines are looked for."""


class PbsError(SchedulerError):
    """A program of PBS is missing or refused; the message holds its own reason."""

    system = "PBS"


_call = partial(call, PbsError)
_tell = partial(tell, PbsError)


@dataclass(frozen=True, kw_only=True)
class PbsJob(BatchState):
    """What PBS says of one job, or of one task of an array.

    Attributes:
        identifier: by which PBS's programs know it.
        status: Exit_status; None where there is none.
    """

    identifier: str
    status: int | None

    ended_states = frozenset({"FINISHED", "COMPLETED", "FAILED", "TERMINATED", "MOVED"})
    running_states = frozenset({"RUNNING", "SUSPENDED"})
    ending_states = frozenset({"EXITING"})

    @property
    @override
    def exit_status(self) -> int:
        if self.status is None or self.status < 0:
            return ExitCode.FAILED
        if self.status > FIRST_SIGNAL_STATUS:
            return status_of_signal(self.status - FIRST_SIGNAL_STATUS)
        return self.status


def submit(script: str, cwd: Path) -> int:
    """Hand a script to qsub and return the job's number.

    Raises:
        PbsError: qsub refused it, or belongs to another batch system.
    """
    version = _call(["qsub", "--version"])
    if "pbs_version" not in version.stdout + version.stderr:
        raise PbsError("this qsub is none of OpenPBS or PBS Professional: jobs of Torque and others are not supported")
    done = _call(["qsub"], input=script, cwd=cwd)
    match = JOB.fullmatch(done.stdout.strip())
    if done.returncode or match is None:
        raise PbsError(f"qsub refused the job: {describe_failure(done)}")
    return int(match[1])


def find_jobs(job: str) -> list[PbsJob]:
    """The job, or all tasks of the array, in order.

    Args:
        job: "12", "12[3]" or "12_3" for one task; each may have PBS's name of its server behind it.

    Raises:
        PbsError: PBS does not know it (any more).
    """
    found = [read_job(values) for values in _look_up(job)]
    tasks = [item for item in found if item.task is not None]
    return sorted(tasks or found, key=lambda item: item.task or 0)


def read_job(values: Mapping[str, str]) -> PbsJob:
    """A job from its identifier, under "", and the attributes that qstat tells."""
    match = JOB.match(values[""])
    assert match is not None
    status, task = values.get("Exit_status"), int(match[2]) if match[2] else None
    state = WORDS.get(values["job_state"], values["job_state"])
    if state == "FINISHED":
        if values.get("substate") == TERMINATED_SUBSTATE or status is None:
            state = "TERMINATED"
        else:
            state = "COMPLETED" if status == "0" else "FAILED"
    comment = values.get("comment", "").removeprefix("Not Running: ")
    is_told = state in ("QUEUED", "HELD", "WAITING") and not comment.startswith("Job ")  # "Job Array Began at …"
    path = values.get("Output_Path", "").partition(":")[2].replace("^array_index^", match[2] or "")
    return PbsJob(
        identifier=values[""],
        name=values.get("Job_Name", ""),
        number=int(match[1]),
        label=match[1] if task is None else f"{match[1]}[{task}]",
        task=task,
        state=state,
        reason=comment if is_told else "",
        status=None if status is None else int(status),
        restarts=max(int(values.get("run_count", 1)) - 1, 0),
        elapsed=values.get("resources_used.walltime", "0:00"),
        num_nodes=values.get("Resource_List.nodect", "?"),
        nodes=",".join(dict.fromkeys(item.partition("/")[0] for item in values.get("exec_host", "").split("+"))),
        log=Path(path) if path else None,
    )


def read_record(job: str) -> Mapping[str, object]:
    """What `trtrun submit` wrote into the job's variables for later; empty where there is none."""
    match = re.search(rf"(?:^|,){RECORD_VARIABLE}=([^,]*)", _look_up(job)[0].get("Variable_List", ""))
    return parse_record(unquote(match[1]) if match else None)


def drain_jobs(jobs: Sequence[BatchState]) -> None:
    """Ask running jobs to end once what is in flight is done.

    Raises:
        PbsError: qsig refused.
    """
    _tell(["qsig", "-s", DRAIN_SIGNAL, *map(_identifier, jobs)])


def end_jobs(jobs: Sequence[BatchState]) -> None:
    """End jobs at once, or take them out of the queue.

    Raises:
        PbsError: qdel refused.
    """
    _tell(["qdel", *map(_identifier, jobs)])


def recall(job: BatchState) -> BatchState | None:
    """How a job ended that PBS has forgotten, which it may do at once: the last line of its log tells.

    Returns:
        The job; None where the log has no such line.
    """
    assert isinstance(job, PbsJob)
    match = _find_in_log(job, END_LINE)
    if match is None:
        return None
    return replace(job, state="FAILED" if int(match) else "COMPLETED", reason="", status=int(match), elapsed="?")


def find_next(number: int) -> Sequence[BatchState]:
    """None: jobs of PBS are in no chain."""
    return ()


def find_successor(job: BatchState) -> BatchState | None:
    """The job that goes on with the rows that an ended one left, as its log tells. PBS may have forgotten it, too."""
    assert isinstance(job, PbsJob)
    number = _find_in_log(job, NEXT_LINE) if job.exit_status == ExitCode.DRAINED else None
    if number is None:
        return None
    log = job.log.with_name(re.sub(rf"\.o{job.number}$", f".o{number}", job.log.name)) if job.log is not None else None
    return replace(
        job, identifier=number, number=int(number), label=number, state="QUEUED", status=None, nodes="", log=log
    )


def _find_in_log(job: BatchState, template: str) -> str | None:
    """The number in the last line of a job's log that is made of a template."""
    try:
        with open(job.log or "", "rb") as file:
            file.seek(max(file.seek(0, 2) - LAST_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    found = re.findall("^" + re.escape(template.format(job=job.label, number="@")).replace("@", "([0-9]+)"), text, re.M)
    return str(found[-1]) if found else None


def _identifier(job: BatchState) -> str:
    assert isinstance(job, PbsJob)
    return job.identifier


def _look_up(job: str) -> list[dict[str, str]]:
    """The attributes of a job or of an array and its tasks; the identifier is under "".

    Raises:
        PbsError: PBS does not know it.
    """
    match = JOB.fullmatch(job)
    if match is None:
        raise PbsError(f"{job!r} is no job: write its number, such as 12, or 12[3] for task 3 of an array")
    number, index, task, server = match.groups("")
    is_single = match[2] is None and match[3] is None
    names = [f"{number}{server}", f"{number}[]{server}"] if is_single else [f"{number}[{index or task}]{server}"]
    for name in names:  # PBS knows an array by its brackets alone
        words = ["-t", "-f", "-F", "dsv", "-D", SEPARATOR, name]
        done = _call(["qstat", "-x", *words])
        if "job history" in done.stderr:  # it is off, and then the option is refused
            done = _call(["qstat", *words])
        found = [
            {"": head.removeprefix("Job Id: "), **dict(item.partition("=")[::2] for item in items)}
            for head, *items in (line.split(SEPARATOR) for line in done.stdout.splitlines() if SEPARATOR in line)
        ]
        if found:
            return found
        if "Unknown Job Id" not in done.stderr:
            raise PbsError(f"qstat: {describe_failure(done)}")
    raise PbsError(f"PBS does not know a job {job}: many clusters forget jobs at their end; see its log")
