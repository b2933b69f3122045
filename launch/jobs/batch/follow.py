"""`trtrun submit --follow`: the logs of a job as they grow, its states as they change, and its exit status at the end.

It reads files and asks the batch system. It changes nothing: a job that is no longer followed goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.exit_codes import ExitCode
from launch.jobs.batch.scheduler import BatchState, Scheduler, SchedulerError

READ_SECONDS = 0.25
"""Between two looks at the logs."""

FIRST_ASK_SECONDS, LAST_ASK_SECONDS = 0.5, 5.0
"""Between two questions to the batch system, which serves all: soon after a change, then less and less often."""

SETTLE_SECONDS = 1.0
"""A shared file system shows the end of a log later than the batch system tells the end of the job."""

MOST_FAILURES = 10
"""Questions in a row that may be left unanswered: a controller that is busy or restarts is no reason to give up."""

CHUNK_BYTES = 1 << 20


class Tail:
    """One log, from where the reader got to.

    Args:
        path: of the log, which may not exist yet.
        prefix: before each of its lines; with a prefix only whole lines are shown.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix.encode()
        self._offset = 0
        self._rest = b""

    def read(self, is_last: bool = False) -> bytes:
        """What came since the last call.

        Args:
            is_last: hold no torn line back.
        """
        data = b"".join(iter(self._read_chunk, b""))
        if not self._prefix:
            return data
        *lines, self._rest = (self._rest + data).split(b"\n")
        if is_last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def _read_chunk(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # the log was begun anew
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return b""
        self._offset += len(data)
        return data


def follow(job: str, scheduler: Scheduler, is_server: bool = False, known: Sequence[BatchState] = ()) -> int:
    """Show a job's logs and states until it ends; return its exit status, of an array the first that is not 0.

    Args:
        job: its number.
        scheduler: that has it. The job that goes on with what it left is followed then.
        is_server: whether it serves, and so has no rows.
        known: the job, as far as it is known before the batch system says more.

    Raises:
        SchedulerError: the batch system does not answer, or has forgotten the job.
        KeyboardInterrupt: the user has seen enough.
    """
    tails: dict[str, Tail] = {}
    told: dict[str, str] = {}
    pause, next_ask, failures = FIRST_ASK_SECONDS, 0.0, 0
    jobs = known
    while True:
        if time.monotonic() >= next_ask:
            try:
                jobs, failures = scheduler.find_jobs(job), 0
            except SchedulerError:
                failures += 1
                recalled = [*filter(None, (item if item.has_ended else scheduler.recall(item) for item in jobs))]
                if jobs and len(recalled) == len(jobs):
                    jobs = recalled
                elif failures > MOST_FAILURES:
                    raise
            is_changed = _tell_states(jobs, told)
            pause = FIRST_ASK_SECONDS if is_changed else min(pause * 1.5, LAST_ASK_SECONDS)
            next_ask = time.monotonic() + pause
            for item in jobs:
                if item.log is not None and not item.is_waiting:
                    tails.setdefault(item.label, Tail(item.log, f"[{item.task}] " if item.task is not None else ""))
        _show(tails)
        if jobs and all(item.has_ended for item in jobs):
            break
        time.sleep(READ_SECONDS)
    time.sleep(SETTLE_SECONDS)
    _show(tails, is_last=True)
    for item in jobs:
        print(f"trtrun: {describe_end(item, is_server)}", file=sys.stderr, flush=True)
    successor = next(filter(None, map(scheduler.find_successor, jobs)), None)
    if successor is not None:
        return follow(successor.label, scheduler, is_server, [successor])
    return next((item.exit_status for item in jobs if item.exit_status), ExitCode.DONE)


def describe_state(job: BatchState) -> str:
    """A job's state as one line."""
    where = f" on {job.nodes}" if job.nodes and job.is_running else ""
    why = f" ({job.reason})" if job.reason else ""
    again = f", start {job.restarts + 1}" if job.restarts else ""
    return f"job {job.label} is {job.state}{where}{why}{again}"


def describe_end(job: BatchState, is_server: bool = False) -> str:
    """How a job ended, as one line."""
    why = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    left = "some requests were cut off" if is_server else "not all is done; the same command goes on with it"
    is_drained = job.state == "FAILED" and job.exit_status == ExitCode.DRAINED
    drained = f": drained, {left}" if is_drained else ""
    return f"job {job.label} {job.state}{why} after {job.elapsed}, exit status {job.exit_status}{drained}"


def _tell_states(jobs: Sequence[BatchState], told: dict[str, str]) -> bool:
    """Say what changed since the last call."""
    is_changed = False
    for item in jobs:
        line = describe_state(item)
        if told.get(item.label) != line:
            told[item.label] = line
            is_changed = True
            if not (item.has_ended or item.is_ending):
                print(f"trtrun: {line}", file=sys.stderr, flush=True)
    return is_changed


def _show(tails: Mapping[str, Tail], is_last: bool = False) -> None:
    for tail in tails.values():
        data = tail.read(is_last)
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
