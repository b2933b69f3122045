"""The batch script of a job: readable, complete, and the same whether it is shown or submitted.

It turns resources and settings into text. It does not know the programs of Slurm (client.py) or what the words after
`trtrun submit … --` mean (commands/submit_arguments.py). No text of the user's reaches the shell unquoted but `setup`
lines, which are shell by definition.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.jobs.slurm.chain import END, Chain, submit_next
from launch.jobs.slurm.container import check_container, container_words, folders_to_bind, prepare_container
from launch.jobs.slurm.resources import BatchResources
from launch.jobs.slurm.script_parts import PLAIN_BODY, draining_body
from launch.jobs.slurm.section import SlurmSection
from trtrun.errors import ConfigError, shorten

RECORD = "# trtrun-job: "
"""Begins the line of the script that `trtrun status` reads back from Slurm."""

TASK_VARIABLE = "SLURM_ARRAY_TASK_ID"
SINGLE_LOG = "trtrun-%j.log"
ARRAY_LOG = "trtrun-%A_%a.log"
END_SECONDS = 10.0
"""How long after the last row a drained job takes to end."""


class Spelled(Protocol):
    """A word of a command line that only the job knows whole."""

    def spell(self, variable: str) -> str:
        """The word as bash takes it; the variable holds the number of the array's task."""


@dataclass(frozen=True)
class Word:
    """A word of a command line in which the number of the array's task stands.

    Attributes:
        before, after: what stands on either side of it.
    """

    before: str
    after: str

    def spell(self, variable: str) -> str:
        """The word as bash takes it, with the task's number from a variable."""
        return "".join(
            [
                shlex.quote(self.before) if self.before else "",
                f'"${variable}"',
                shlex.quote(self.after) if self.after else "",
            ]
        )


@dataclass(frozen=True)
class Array:
    """A job array that splits the rows of one prompts file.

    Attributes:
        count: jobs, numbered from 1.
        at_once: the most that run at the same time, None for all.
    """

    count: int
    at_once: int | None = None

    def __str__(self) -> str:
        return f"1-{self.count}" + (f"%{self.at_once}" if self.at_once else "")


@dataclass(frozen=True)
class BatchJob:
    """Everything that the script says.

    Attributes:
        resources: nodes, ranks, GPUs, the configuration and its section of the batch system.
        words: the command line of trtrun.
        folder: where the job runs; relative paths start there.
        output: file of the output rows, absolute; None for a command that keeps none. In an array, the name that the
            tasks' files are made from.
        rows: input rows, None where the command has none.
        array: None for a single job.
        is_server: whether the command serves until it is told to end, and then drains.
        steps: file of a training run that gets a line for each step, absolute; None for other commands.
        chain: of a server that others follow; None for other jobs.
    """

    resources: BatchResources
    words: Sequence[str | Word]
    folder: Path
    output: Path | None = None
    rows: int | None = None
    array: Array | None = None
    is_server: bool = False
    steps: Path | None = None
    chain: Chain | None = None

    @property
    def goes_on(self) -> bool:
        """Whether another start of the command does what is left."""
        return self.output is not None or self.steps is not None

    @property
    def drains(self) -> bool:
        """Whether a signal has the command end what it has begun."""
        return self.is_server or self.goes_on

    @property
    def slurm(self) -> SlurmSection:
        """The settings."""
        return self.resources.slurm

    @property
    def folders_inside(self) -> list[str]:
        """What an image must have of the host for the command, the job's folder first."""
        texts = [word.rpartition("=")[2] if word.startswith("-") else word for word in self.words if type(word) is str]
        return folders_to_bind(self.folder, self.output, texts)

    @property
    def log(self) -> str:
        """The log's path with Slurm's patterns, as the settings give it."""
        if self.array is not None and self.slurm.output == SINGLE_LOG:
            return ARRAY_LOG
        return self.slurm.output


def part_output(output: Path, count: int) -> Word:
    """Output file of an array's task, as `merge.part_path` names it: out.jsonl becomes out.part-I-of-N.jsonl."""
    return Word(f"{output.with_name(output.stem)}.part-", f"-of-{count}{output.suffix}")


def render_script(job: BatchJob) -> str:
    """The batch script.

    Raises:
        ConfigError: settings that do not fit together.
    """
    _check(job)
    sections = [
        ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in _directives(job)), RECORD + make_record(job)],
        [*describe_ranks(job)],
        [
            'echo "trtrun: $(date +%FT%T) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, '
            'start $((${SLURM_RESTART_COUNT:-0} + 1))"',
        ],
        [*submit_next(job.chain, job.slurm, _limit(job.slurm))] if job.chain is not None else [],
        ["# launch.slurm.setup", *job.slurm.setup] if job.slurm.setup else [],
        [*_command(job)],
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


def _directives(job: BatchJob) -> Iterator[str]:
    """Options of sbatch."""
    slurm, resources = job.slurm, job.resources
    gres = slurm.gres or (f"gpu:{resources.gpus}" if resources.gpus else None)
    named = ",".join(resources.named) or None
    options: list[tuple[str, object]] = [
        ("job-name", slurm.job_name),
        ("chdir", job.folder),
        ("output", job.log),
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


def make_record(job: BatchJob) -> str:
    """What `trtrun status` wants to know of the job, as one line of ASCII."""
    output = None if job.output is None else str(job.output)
    record = {"output": output, "rows": job.rows, "parts": job.array.count if job.array else None}
    if job.steps is not None:
        record["steps"] = str(job.steps)
    if job.chain is not None:
        record["name_file"] = str(job.chain.name_file)
    return json.dumps(record | ({"server": True} if job.is_server else {}))


def describe_ranks(job: BatchJob) -> Iterator[str]:
    """Comments that tell each rank's place."""
    topology, resources = job.resources.topology, job.resources
    made_up = [host for host in resources.hosts if host not in resources.named]
    which = f" ({made_up[0]} is the allocation's first node)" if made_up and not resources.named else ""
    yield f"# Ranks{which}:"
    for rank in range(topology.world_size):
        yield f"#   {topology.describe(rank)}"


def _command(job: BatchJob) -> Iterator[str]:
    """The command as an array of bash, an option a line."""
    from launch.jobs.slurm.script_parts import prepare_step, step_words

    container, before, python = job.slurm.container, list[str](), sys.executable
    is_step = job.slurm.launcher == "srun" and job.resources.topology.world_size > 1
    if is_step:
        yield from prepare_step(job.resources)
        before = step_words(job.resources)
    if container is not None:
        yield from prepare_container(container, is_step)
        before = container_words(job.resources, before, job.folders_inside)
        python = "python3"
    starts: list[str | Word] = [*before, python, "-m"]
    if is_step:
        starts += ["mpi4py", "-m"]  # an exception on one rank would hang the others under plain python
    yield "job=("
    yield from (f"    {line}" for line in wrap_words([*starts, "launch.cli", *job.words]))
    yield ")"


def wrap_words(words: Iterable[str | Spelled], variable: str = TASK_VARIABLE) -> Iterator[str]:
    """Quoted words, with a new line before each long option of trtrun's command.

    Args:
        words: of the whole command.
        variable: that holds the number of an array's task.
    """
    line: list[str] = []
    is_command = False
    for word in words:
        if is_command and isinstance(word, str) and word.startswith("--"):
            yield " ".join(line)
            line = []
        is_command = is_command or word == "launch.cli"
        line.append(shlex.quote(word) if isinstance(word, str) else word.spell(variable))
    yield " ".join(line)


def _body(job: BatchJob) -> str:
    """Run the command, so that a signal drains it where it can."""
    drain_seconds = job.resources.config.launch.drain_seconds
    if not job.drains:
        return PLAIN_BODY
    if not (job.goes_on and job.slurm.requeue):
        return draining_body(drain_seconds, at_end="" if job.chain is None else END)
    if job.output is None:
        return draining_body(drain_seconds, shlex.quote(str(job.steps)), "steps")
    partial = shlex.quote(f"{job.output}.partial")
    if job.array is not None:
        word = part_output(job.output, job.array.count)
        partial = Word(word.before, f"{word.after}.partial").spell(TASK_VARIABLE)
    return draining_body(drain_seconds, partial)


def _check(job: BatchJob) -> None:
    """Raise ConfigError for settings that sbatch would take, and that would go wrong later."""
    slurm, drain_seconds = job.slurm, job.resources.config.launch.drain_seconds
    for option in slurm.extra:
        if not option.startswith("-"):
            raise ConfigError(f"launch.slurm.extra: {option!r} is no option of sbatch: write it with its dashes")
    folder = (job.folder / slurm.output).parent
    if "%" not in str(folder) and not folder.is_dir():
        raise ConfigError(f"launch.slurm.output: {folder} does not exist, and Slurm does not make it: make it")
    if slurm.container is not None:
        check_container(job.resources, job.folders_inside)
    limit = _limit(slurm)
    if job.output is None and slurm.requeue and job.words[0] == "run":
        raise ConfigError("launch.slurm.requeue: only a run with --output FILE.jsonl keeps rows to go on with")
    if not job.drains:
        return
    if limit is not None and limit <= slurm.signal_seconds:
        raise ConfigError(
            f"launch.slurm.time: with a limit of {slurm.time} the warning {slurm.signal_seconds} s before the end "
            f"(launch.slurm.signal_seconds) would come at once: ask for more time, or for a shorter warning"
        )
    if (slurm.requeue or job.is_server) and slurm.signal_seconds < drain_seconds + END_SECONDS:
        raise ConfigError(
            f"launch.slurm.signal_seconds: a warning of {slurm.signal_seconds} s is too short for "
            f"launch.drain_seconds ({drain_seconds:g}) and {END_SECONDS:g} s to end: raise it, or drain for less"
        )


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
