"""`trtrun submit`, `trtrun status` and `trtrun cancel`: parse their command lines and talk to the user."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launch.commands.model_options import tell_choices
from launch.commands.schedulers import PROGRAMS, check_batch_sections, find_system

if TYPE_CHECKING:
    from launch.commands.schedulers import BatchSystem
    from launch.jobs.batch.job import Array, BatchJob

SETTINGS = (
    ("--partition", "partition", "NAME", "Partition to run in, or queue of PBS."),
    ("--account", "account", "NAME", "Account that pays."),
    ("--qos", "qos", "NAME", "Quality of service."),
    ("--reservation", "reservation", "NAME", "Reservation to run in."),
    ("--constraint", "constraint", "LIST", "Features that the nodes must have."),
    ("--time", "time", "LIMIT", 'Time limit, such as "2:00:00", or minutes.'),
    ("--nodelist", "nodelist", "LIST", "Nodes that must be among the job's."),
    ("--gres", "gres", "LIST", "Generic resources of each node, such as gpu:4.  [default: what the devices need]"),
    ("--cpus-per-task", "cpus_per_task", "N", "CPU cores of each rank.  [default: threads]"),
    ("--mem", "memory", "SIZE", "Memory of each node, such as 64G."),
    ("--job-name", "job_name", "NAME", "Name of the job."),
    ("--log", "output", "PATH", "The log; %j is the job's number, %A an array's, %a a task's (of PBS ^array_index^)."),
)
"""Options that stand for keys of launch.slurm: option, key, what it takes, help."""

PBS_NAMES = {"partition": "queue", "time": "walltime"}
"""Of those keys that launch.pbs has under another name."""

_with_scheduler = click.option("--scheduler", type=click.Choice([*PROGRAMS]), help="Batch system.  [default: found]")


def _read_array(context: click.Context, parameter: click.Parameter, value: str | None) -> Array | None:
    """N, or N%M for at most M at once."""
    from launch.jobs.batch.job import Array

    if value is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?:%([1-9][0-9]{0,5}))?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no number of jobs: write such as 4, or 100%8 for at most 8 at once")
    return Array(int(match[1]), int(match[2]) if match[2] else None)


def _settings_for(system: BatchSystem, settings: dict[str, object]) -> dict[str, object]:
    """The keys of a batch system's section that options set.

    Raises:
        click.UsageError: it has no such key.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if system.name != "pbs":
        return given
    from launch.jobs.pbs.section import PbsSection

    for name in given:
        if PBS_NAMES.get(name, name) not in PbsSection.model_fields:
            option = next((option for option, key, *_ in SETTINGS if key == name), f"--{name}")
            raise click.UsageError(f"{option} is for Slurm: PBS has launch.pbs.place, launch.pbs.resources and extra")
    return {PBS_NAMES.get(name, name): value for name, value in given.items()}


def _with_settings(command: Any) -> Any:
    for option, key, metavar, text in reversed(SETTINGS):
        command = click.option(option, key, metavar=metavar, help=text)(command)
    return command


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="YAML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any key of the YAML file.")
@click.option("--dry-run", is_flag=True, help="Show the batch script; submit nothing.")
@click.option("--follow", is_flag=True, help="Show the log until the job ends, and end with its exit status.")
@click.option("--array", callback=_read_array, metavar="N[%M]", help="Split the rows over N jobs, M at once.")
@click.option("--chain", type=click.IntRange(2, 10_000), metavar="N", help="N serve jobs, each taking over in time.")
@click.option("--requeue/--no-requeue", default=None, help="Put a job that reaches its time limit back into the queue.")
@click.option("--exclusive", is_flag=True, default=None, help="Take whole nodes.")
@_with_settings
@_with_scheduler
@click.argument("words", nargs=-1, metavar="-- COMMAND [OPTION]…", type=click.UNPROCESSED)
def submit(
    config_path: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    array: Array | None,
    chain: int | None,
    words: tuple[str, ...],
    **settings: Any,
) -> int:
    """Run a command of trtrun as a job of Slurm or PBS, such as:

        trtrun submit --config F.yaml --time 2:00:00 -- run --prompts P.jsonl --output O.jsonl

    The nodes, ranks and GPUs come from the devices in the YAML file, or from --devices behind the -- without one;
    everything else from its launch.slurm or launch.pbs section and the options here. What is wrong with the command is
    said now, not when the job starts.
    """
    from launch.commands.submit_arguments import make_job, merge_words, parse_inner
    from launch.jobs.batch.resources import read_resources

    inner = parse_inner(words, config_path, overrides)
    tell_choices(inner.settled)
    values = inner.read(inner.settled.path, inner.overrides)
    check_batch_sections(values, str(inner.settled.path))
    system = find_system(values, settings.pop("scheduler"))
    if chain is not None and system.name != "slurm":
        raise click.UsageError("--chain is of Slurm: jobs of PBS do not follow each other")
    changes = _settings_for(system, settings)
    resources = read_resources(inner.settled.path, values, system.section_class, changes, inner.place_ranks)
    job = make_job(inner, resources, overrides, array, chain)
    script = system.render_script(job)
    if resources.lacks_cores:
        print(
            "trtrun: the one process of the job computes on one core, most clusters' default: --cpus-per-task N, or "
            "the key threads, asks for more",
            file=sys.stderr,
            flush=True,
        )
    if dry_run:
        print(script, end="")
        return 0
    status = _submit(system, job, script, follow)
    if array is not None:
        when = "now" if follow and not status else "when all jobs are done"
        print(f"trtrun: {when}, join the parts: {shlex.join(merge_words(inner, array))}", file=sys.stderr, flush=True)
    return status


def _submit(system: BatchSystem, job: BatchJob, script: str, is_followed: bool) -> int:
    from launch.jobs.batch.scheduler import SchedulerError

    number = system.scheduler.submit(script, job.folder)
    try:
        jobs = system.scheduler.find_jobs(str(number))
    except SchedulerError:
        print(f"trtrun: job {number} is submitted", file=sys.stderr, flush=True)
        raise
    logs = str(jobs[0].log) if len(jobs) == 1 else f"{jobs[0].log} to {jobs[-1].log}"
    print(f"trtrun: job {number} is submitted; log: {logs}", file=sys.stderr, flush=True)
    if is_followed:
        return _follow(system, str(number), job.is_server)
    if job.chain is not None:
        print(f"trtrun: {job.chain.name_file} says where it listens, once it does", file=sys.stderr, flush=True)
    elif job.is_server:
        print(f"trtrun: where it listens, once it does: trtrun status {number}", file=sys.stderr, flush=True)
    print(number)
    return 0


def _follow(system: BatchSystem, job: str, is_server: bool) -> int:
    from launch.jobs.batch.follow import follow

    try:
        return follow(job, system.scheduler, is_server)
    except KeyboardInterrupt:
        print(
            f"\ntrtrun: job {job} goes on; see: trtrun status {job}, or end it: trtrun cancel {job}",
            file=sys.stderr,
            flush=True,
        )
        raise


@click.command()
@click.argument("job")
@_with_scheduler
def status(job: str, scheduler: str | None) -> int:
    """Show a job's state, nodes, time, log, finished rows, and where it serves. JOB is a number, or a task of an array:
    ARRAY_TASK."""
    from launch.commands.batch_status import show_jobs

    system = find_system(name=scheduler)
    show_jobs(system.scheduler.find_jobs(job), system.scheduler)
    return 0


@click.command()
@click.argument("job")
@click.option("--now", is_flag=True, help="End the job at once; without it what is in flight may finish.")
@_with_scheduler
def cancel(job: str, now: bool, scheduler: str | None) -> int:
    """End a job so that it loses no finished row: running jobs drain, waiting ones leave the queue, as
    does the next one of a chain.

    JOB is a number, or ARRAY_TASK for one task of an array.
    """
    from launch.jobs.batch.scheduler import SchedulerError

    system = find_system(name=scheduler).scheduler
    jobs = [item for item in system.find_jobs(job) if not (item.has_ended or item.is_ending)]
    jobs += [item for each in jobs for item in system.find_next(each.number) if item.is_waiting]
    if not jobs:
        raise SchedulerError(f"job {job} has ended already; see: trtrun status {job}")
    # Waiting jobs first: a task that ends must not let the next one start.
    waiting = [item for item in jobs if now or not item.is_running]
    draining = [item for item in jobs if not now and item.is_running]
    if waiting:
        system.end_jobs(waiting)
    if draining:
        system.drain_jobs(draining)
    for item in jobs:
        asked = f"is asked to end, and what is in flight may finish; see: trtrun status {item.label}"
        what = asked if item in draining else "is ended"
        print(f"trtrun: job {item.label} {what}", file=sys.stderr, flush=True)
    return 0
