"""The batch script of a job of Slurm: readable, complete, and the same whether it is shown or submitted.

It turns resources and settings into text. It does not know the programs of Slurm (client.py). No text of the user's
reaches the shell unquoted but `setup` lines, which are shell by definition.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from launch.jobs.batch.job import (
    BatchJob,
    check_settings,
    check_warning,
    make_record,
)
from launch.jobs.batch.script_parts import describe_ranks, find_finished, wrap_words
from launch.jobs.slurm.chain import END, submit_next
from launch.jobs.slurm.container import check_container, container_words, folders_to_bind, prepare_container
from launch.jobs.slurm.script_parts import PLAIN_BODY, draining_body, prepare_step, step_words
from launch.jobs.slurm.section import SlurmSection
from trtrun.errors import ConfigError, shorten

RECORD = "# trtrun-job: "
"""Begins the line of the script that `trtrun status` reads back from Slurm."""

TASK_VARIABLE = "SLURM_ARRAY_TASK_ID"
SINGLE_LOG = "trtrun-%j.log"
ARRAY_LOG = "trtrun-%A_%a.log"


def render_script(job: BatchJob) -> str:
    """The batch script.

    Raises:
        ConfigError: settings that do not fit together.
    """
    slurm = job.resources.section_as(SlurmSection)
    _check(job, slurm)
    sections = [
        ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in _directives(job, slurm)), RECORD + make_record(job)],
        [*describe_ranks(job)],
        [
            'echo "trtrun: $(date +%FT%T) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, '
            'start $((${SLURM_RESTART_COUNT:-0} + 1))"',
        ],
        [*submit_next(job.chain, slurm, _limit(slurm))] if job.chain is not None else [],
        ["# launch.slurm.setup", *slurm.setup] if slurm.setup else [],
        [*_command(job, slurm)],
        [_body(job)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def quote_directive(value: str) -> str:
    """A value as sbatch reads it in an #SBATCH line: it knows double quotes and backslashes, but no other shell.

    Raises:
        ConfigError: it does not fit into a line.
    """
    if not value.isprintable():
        raise ConfigError(f"{value!r} cannot stand in a batch script: submit from a folder with a plain name")
    if value and all(character.isalnum() or character in "-_./:,=+@%[]()&|*!" for character in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _directives(job: BatchJob, slurm: SlurmSection) -> Iterator[str]:
    """Options of sbatch."""
    resources = job.resources
    gres = slurm.gres or (f"gpu:{resources.gpus}" if resources.gpus else None)
    named = ",".join(resources.named) or None
    log = ARRAY_LOG if job.array is not None and slurm.output == SINGLE_LOG else slurm.output
    options: list[tuple[str, object]] = [
        ("job-name", slurm.job_name),
        ("chdir", job.folder),
        ("output", log),
        ("open-mode", "append"),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("reservation", slurm.reservation),
        ("constraint", slurm.constraint),
        ("time", slurm.time),
        ("array", job.array),
        ("nodes", resources.nodes),
        ("nodelist", slurm.nodelist or named),
        ("ntasks-per-node", resources.tasks_per_node),
        ("cpus-per-task", resources.cpus_per_task),
        ("mem", slurm.memory),
        ("gres", gres),
    ]
    yield from (f"--{name}={quote_directive(str(value))}" for name, value in options if value is not None)
    if slurm.exclusive:
        yield "--exclusive"
    yield "--requeue" if slurm.requeue and job.goes_on else "--no-requeue"
    if job.drains:
        yield f"--signal=B:USR1@{slurm.signal_seconds}"
    yield from slurm.extra


def _command(job: BatchJob, slurm: SlurmSection) -> Iterator[str]:
    """The command as an array of bash, an option a line."""
    container, before, python = slurm.container, list[str](), sys.executable
    is_step = slurm.launcher == "srun" and job.resources.topology.world_size > 1
    if is_step:
        yield from prepare_step(job.resources)
        before = step_words(job.resources)
    if container is not None:
        yield from prepare_container(container, is_step)
        before = container_words(job.resources, before, folders_to_bind(job))
        python = "python3"
    starts = [*before, python, "-m"]
    if is_step:
        starts += ["mpi4py", "-m"]  # an exception on one rank would hang the others under plain python
    yield "job=("
    yield from (f"    {line}" for line in wrap_words([*starts, "launch.cli", *job.words], TASK_VARIABLE))
    yield ")"


def _body(job: BatchJob) -> str:
    """Run the command, so that a signal drains it where it can."""
    if not job.drains:
        return PLAIN_BODY
    drain_seconds = job.resources.config.launch.drain_seconds
    return draining_body(drain_seconds, find_finished(job, TASK_VARIABLE), "" if job.chain is None else END)


def _check(job: BatchJob, slurm: SlurmSection) -> None:
    """Raise ConfigError for settings that sbatch would take, and that would go wrong later."""
    check_settings(job, "sbatch")
    folder = (job.folder / slurm.output).parent
    if "%" not in str(folder) and not folder.is_dir():
        raise ConfigError(f"launch.slurm.output: {folder} does not exist, and Slurm does not make it: make it")
    if slurm.container is not None:
        check_container(job.resources, folders_to_bind(job))
    check_warning(job, "time", slurm.time, _limit(slurm))


def _limit(slurm: SlurmSection) -> float | None:
    """Seconds of the time limit; None where there is none."""
    return parse_time(slurm.time) if slurm.time is not None else None


def parse_time(text: str) -> float | None:
    """Seconds of a time limit as sbatch takes it; None for none.

    Args:
        text: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes",
            "days-hours:minutes:seconds", or "UNLIMITED".

    Raises:
        ConfigError: it is no such text.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", text)
    if match is None:
        raise ConfigError(
            f'launch.slurm.time: {shorten(text)} is no time limit: write "hours:minutes:seconds", or minutes'
        )
    days, first, second, third = (None if group is None else int(group) for group in match.groups())
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)
