"""A batch job: what its script says, what is written down of it for later, and what it would be refused for.

It knows none of them, nor what the words after `trtrun submit … --` mean (commands/submit_arguments.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.jobs.batch.resources import BatchResources
from trtrun.errors import ConfigError

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
class Chain:
    """Jobs of one name.

    Attributes:
        count: jobs in all.
        name_file: that says where the newest server listens, absolute.
    """

    count: int
    name_file: Path


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


def part_output(output: Path, count: int) -> Word:
    """Output file of an array's task, as `merge.part_path` names it: out.jsonl becomes out.part-I-of-N.jsonl."""
    return Word(f"{output.with_name(output.stem)}.part-", f"-of-{count}{output.suffix}")


def make_record(job: BatchJob) -> str:
    """What `trtrun status` wants to know of the job, as one line of ASCII."""
    output = None if job.output is None else str(job.output)
    record = {"output": output, "rows": job.rows, "parts": job.array.count if job.array else None}
    if job.steps is not None:
        record["steps"] = str(job.steps)
    if job.chain is not None:
        record["name_file"] = str(job.chain.name_file)
    return json.dumps(record | ({"server": True} if job.is_server else {}))


def parse_record(text: str | None) -> Mapping[str, object]:
    """What `make_record` has written; empty where the text is lost, or is none."""
    try:
        record = json.loads(text or "{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def check_settings(job: BatchJob, program: str) -> None:
    """Raise ConfigError for settings that a program which submits would take, and that would go wrong later."""
    section = job.resources.section
    for option in section.extra:
        if not option.startswith("-"):
            raise ConfigError(
                f"{section.place_in_file}.extra: {option!r} is no option of {program}: write it with its dashes"
            )
    if job.output is None and section.requeue and job.words[0] == "run":
        raise ConfigError(
            f"{section.place_in_file}.requeue: only a run with --output FILE.jsonl keeps rows to go on with"
        )


def check_warning(job: BatchJob, key: str, written: str | None, limit: float | None) -> None:
    """Raise ConfigError where the warning before the time limit comes too early or too late to drain.

    Args:
        job: that is warned.
        key: of the time limit.
        written: its value.
        limit: the same in seconds; None where there is none.
    """
    if not job.drains:
        return
    section, drain_seconds = job.resources.section, job.resources.config.launch.drain_seconds
    place, seconds = section.place_in_file, section.signal_seconds
    if limit is not None and limit <= seconds:
        raise ConfigError(
            f"{place}.{key}: with a limit of {written} the warning {seconds} s before the end "
            f"({place}.signal_seconds) would come at once: ask for more time, or for a shorter warning"
        )
    if (section.requeue or job.is_server) and seconds < drain_seconds + END_SECONDS:
        raise ConfigError(
            f"{place}.signal_seconds: a warning of {seconds} s is too short for launch.drain_seconds "
            f"({drain_seconds:g}) and {END_SECONDS:g} s to end: raise it, or drain for less"
        )
