"""`trtrun status`: what the batch system says of a job, how many rows are finished, and where its server listens.

It prints. It changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch.batch.merge import part_path
from launch.jobs.batch.follow import describe_end, describe_state
from launch.jobs.batch.reach import find_served, socket_path
from launch.jobs.batch.scheduler import BatchState, Scheduler
from launch.serve.handover.name_file import NameFile


def show_jobs(jobs: Sequence[BatchState], scheduler: Scheduler) -> None:
    """Print a paragraph for each job, and the sum of an array's rows."""
    record = scheduler.read_record(str(jobs[0].number))
    for job in jobs:
        print("\n".join(describe(job, record, scheduler)))
        successor = scheduler.find_successor(job) if job.has_ended else None
        if successor is not None:
            print(f"  next     job {successor.label} goes on")
    counts = [count_rows(file) for file in (_output(job, record) for job in jobs) if file is not None]
    if len(jobs) > 1 and len(jobs) == record.get("parts"):
        print(f"rows of all: {sum(counts)} of {record.get('rows')} done")


def describe(job: BatchState, record: Mapping[str, object], scheduler: Scheduler) -> Iterator[str]:
    """The lines about one job.

    Args:
        job: what the batch system says.
        record: what `trtrun submit` wrote down.
        scheduler: of the job.
    """
    is_server = record.get("server") is True
    yield f"{describe_end(job, is_server) if job.has_ended else describe_state(job)}"
    yield f"  name     {job.name}"
    yield f"  nodes    {job.nodes or f'{job.num_nodes}, none yet'}"
    yield f"  elapsed  {job.elapsed}"
    if job.restarts:
        yield f"  starts   {job.restarts + 1}"
    if job.log is not None:
        yield f"  log      {job.log}"
    if is_server and job.is_running:
        yield from describe_served(job)
        yield from describe_chain(job, record.get("name_file"), scheduler)
    output = _output(job, record)
    if output is not None:
        total = f" of {record.get('rows')}" if record.get("parts") is None else ""
        yield f"  output   {output}"
        yield f"  rows     {count_rows(output)}{total} done"
    steps = record.get("steps")
    if isinstance(steps, str):
        yield f"  steps    {_count_lines(Path(steps)) or 0} done"


def describe_served(job: BatchState) -> Iterator[str]:
    """Where a job's server listens, and how it is reached."""
    try:
        log = job.log.read_text(encoding="utf-8", errors="replace") if job.log is not None else ""
    except OSError:
        log = ""
    served = find_served(log)
    yield f"  served   {served.url if served is not None else 'not yet: see the log'}"
    if served is not None and served.way is not None:
        yield f"  reach    {served.way}"
    path = None if served is None else socket_path(served.url)
    if path is not None:
        yield f"  there    curl --unix-socket {shlex.quote(path)} http://localhost/v1/models"


def describe_chain(job: BatchState, name_file: object, scheduler: Scheduler) -> Iterator[str]:
    """Which job of a chain has its name, and which one follows."""
    if not isinstance(name_file, str):
        return
    name = NameFile(Path(name_file)).read_name()
    told = "nothing yet" if name is None else f"job {name.job}, {name.url}"
    yield f"  name     {name_file} says {told}"
    for item in scheduler.find_next(job.number):
        yield f"  next     {describe_state(item)}"


def count_rows(output: Path) -> int:
    """Finished rows of a run: in its working file, or in the output file where that is in place."""
    for file in (output.with_name(f"{output.name}.partial"), output):
        found = _count_lines(file)
        if found is not None:
            return found
    return 0


def _count_lines(file: Path) -> int | None:
    """Lines of a file; None where it cannot be read."""
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return None


def _output(job: BatchState, record: Mapping[str, object]) -> Path | None:
    output, parts = record.get("output"), record.get("parts")
    if not isinstance(output, str):
        return None
    if isinstance(parts, int) and job.task is not None:
        return part_path(output, job.task, parts)
    return Path(output)
