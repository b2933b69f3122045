"""The command behind `trtrun submit … --`: checked as trtrun itself would, before anything is submitted.

It knows the commands that make sense in a batch job and what they need of it. It does not know Slurm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from launch.batch.merge import part_path
from launch.batch.options import Part, RunOptions
from launch.commands.bench import bench
from launch.commands.common import server_overrides
from launch.commands.inspect_job import check
from launch.commands.model_options import Settled, config_words, settle
from launch.commands.prompts import given_sampling
from launch.commands.run import data_options, generate_data, merge, run
from launch.commands.serve import check_extra, check_served, serve
from launch.commands.train_drafter import train_drafter, train_options
from launch.jobs.batch.job import Array, BatchJob, Chain, Word, part_output
from launch.jobs.batch.resources import BatchResources
from launch.train.job import place_training_ranks, read_training_values
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.configuration.yaml_source import COMMAND_LINE, read_values
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import ConfigError, nearest

COMMANDS: dict[str, click.Command] = {
    "run": run,
    "bench": bench,
    "check": check,
    "serve": serve,
    "generate-data": generate_data,
    "train-drafter": train_drafter,
}
"""What may be submitted."""

PLACES = {"host", "uds", "http_port", "grpc_port", "metrics_port", "tls_cert", "name_file"}
"""Keys of `server` that say where it listens, or that it has ports: the server that follows may be on another node."""

OF_ROWS = ("run", "generate-data")
"""Those that keep output rows."""


@dataclass(frozen=True)
class Inner:
    """A command line of trtrun that a job will run.

    Attributes:
        name: of the command.
        rest: its words as they were given, without the configuration's.
        parameters: what click makes of all words.
        command: click's description of it.
        settled: the configuration.
    """

    name: str
    rest: tuple[str, ...]
    parameters: dict[str, Any]
    command: click.Command
    settled: Settled

    @property
    def overrides(self) -> list[str]:
        """Changes of the YAML file that the whole command line makes."""
        return [*self.settled.overrides, *server_overrides(self.parameters)]

    def place_ranks(self, config: RuntimeConfig) -> Topology:
        """Who sits where when the command runs."""
        return place_training_ranks(config) if self.name == "train-drafter" else make_topology(config)

    def read(self, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """What the YAML file holds for the command."""
        return read_training_values(path, overrides) if self.name == "train-drafter" else read_values(path, overrides)


def parse_inner(words: Sequence[str], config_path: Path | None, overrides: Sequence[str]) -> Inner:
    """Parse a command line as trtrun does, with submit's own --config and --set in it.

    Raises:
        click.UsageError: there is no such command, or its options are wrong.
    """
    if not words:
        raise click.UsageError("name what the job runs, such as: -- run --prompts FILE.jsonl --output FILE.jsonl")
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        raise click.UsageError(f"'{name}' cannot be submitted{nearest(name, COMMANDS)}")
    if any(word == "--config" or word.startswith("--config=") for word, _ in _options(command, rest)):
        raise click.UsageError("give --config once, before the --")
    arguments = [*config_words(config_path or COMMAND_LINE, overrides), *rest]
    with command.make_context(f"trtrun submit … -- {name}", arguments) as context:
        return Inner(name, tuple(rest), dict(context.params), command, _settle(context.params))


def _settle(parameters: dict[str, Any]) -> Settled:
    """The configuration of a command; without a file its devices must be named, as they are another host's."""
    path, overrides = parameters["config_path"], parameters["overrides"]
    if path is None and parameters.get("devices") is None and not any("target.devices" in word for word in overrides):
        raise click.UsageError("without --config FILE, name the devices on the job's node: --devices 0,1")
    return settle(path, overrides, parameters["speculation"], parameters)


def make_job(
    inner: Inner,
    resources: BatchResources,
    overrides: Sequence[str],
    array: Array | None,
    chain: int | None = None,
) -> BatchJob:
    """The batch job of a command, once the command's own mistakes are told.

    Raises:
        TrtrunError: the command would refuse to run, or cannot run as asked.
        click.UsageError: options that do not fit together.
    """
    start = [inner.name, *config_words(inner.settled.path, [*inner.settled.chosen, *overrides])]
    if array is not None and inner.name != "run":
        other = "; submit its --part" if inner.name == "generate-data" else f"; {inner.name} has none"
        raise click.UsageError(f"--array splits the rows of `run`{other}")
    if chain is not None:
        return _make_chain(inner, resources, start, chain)
    if inner.name == "train-drafter":
        resume = () if inner.parameters["resume"] else ("--resume",)
        return BatchJob(resources, [*start, *inner.rest, *resume], Path.cwd(), steps=_check_training(inner, resources))
    if inner.name == "serve":
        _check_serve(resources)
        return BatchJob(resources, [*start, *inner.rest, *_place_words(resources.config)], Path.cwd(), is_server=True)
    if inner.name not in OF_ROWS:
        return BatchJob(resources, [*start, *inner.rest], Path.cwd())
    options = run_options(inner.parameters) if inner.name == "run" else data_options(inner.parameters)
    rows = _check_run(options, resources, array, [*start, *inner.rest])
    output = Path(options.output).resolve() if options.output is not None and options.keeps_rows else None
    if output is None:
        return BatchJob(resources, [*start, *inner.rest], Path.cwd(), rows=rows)
    rest: list[str | Word] = list(inner.rest) if array is None else [*_without(inner, "--output")]
    if array is not None:
        assert options.output is not None
        rest += ["--output", part_output(Path(options.output), array.count), "--part", Word("", f"/{array.count}")]
    if not options.resume:
        rest.append("--resume")
    return BatchJob(resources, [*start, *rest], Path.cwd(), output, rows, array)


def _make_chain(inner: Inner, resources: BatchResources, start: Sequence[str], count: int) -> BatchJob:
    """The first of several servers of one name, each with free ports: two of them may run on one node.

    Raises:
        click.UsageError: the command is no server.
    """
    if inner.name != "serve":
        raise click.UsageError(f"--chain is of servers: {inner.name} is none; launch.slurm.requeue goes on with rows")
    _check_serve(resources)
    section = resources.config.server
    added = [
        word
        for option in ("http_port", "grpc_port", "metrics_port")
        if option not in section.model_fields_set and section.uds is None
        for word in (f"--{option.replace('_', '-')}", "0")
    ]
    name_file = section.name_file
    if name_file is None:
        name_file = Path(f"{resources.section.job_name}.server.json")
        if name_file.name != str(name_file):
            raise ConfigError("server.name_file: missing, and no file can be called as launch.slurm.job_name is")
        added += ["--name-file", str(name_file)]
    words = [*start, *inner.rest, *added]
    return BatchJob(resources, words, Path.cwd(), is_server=True, chain=Chain(count, name_file.absolute()))


def merge_words(inner: Inner, array: Array) -> list[str]:
    """The command that joins the outputs of an array's jobs, and compares them with the input."""
    known = {name for item in merge.params if item.name != "output" for name in item.opts}
    output = str(inner.parameters["output"])
    same = [
        item for word, words in _options(inner.command, inner.rest) if word.partition("=")[0] in known for item in words
    ]
    parts = [str(part_path(output, number, array.count)) for number in range(1, array.count + 1)]
    return ["trtrun", "merge", *same, "--output", output, *parts]


def run_options(parameters: dict[str, Any]) -> RunOptions:
    """What `trtrun run` makes of its parameters."""
    known = {item.name for item in fields(SamplingParams)}
    return RunOptions(
        parameters["prompts"],
        parameters["prompts_file"],
        parameters["output"],
        given_sampling({name: value for name, value in parameters.items() if name in known}),
        parameters["resume"],
        parameters["part"],
    )


def _check_run(options: RunOptions, resources: BatchResources, array: Array | None, words: Sequence[str]) -> int:
    """Raise for what `trtrun run` would refuse; returns the number of input rows."""
    from launch.batch.checks import check_run, read_input
    from launch.batch.journal import check_output, finished_rows
    from launch.jobs.mpi.job import Job

    if options.resume and not options.keeps_rows:
        raise click.UsageError("--resume needs --output FILE.jsonl, the file to go on with")
    if array is not None and not options.keeps_rows:
        raise click.UsageError("--array needs --output FILE.jsonl: each job of the array writes a part beside it")
    if array is not None and options.part is not None:
        raise click.UsageError("--array and --part exclude each other: an array gives each job its part")
    rows = read_input(replace(options, part=None), resources.config)
    if array is not None and array.count > len(rows):
        raise ConfigError(f"--array {array.count}: the input has {len(rows)} rows: make at most as many jobs")
    if resources.has_local_models:
        check_run(Job(resources.config, words), replace(options, output=None, resume=False))
        _check_weights(resources)
    for name, part in _outputs(options, array):
        check_output(name, options.prompts_file)
        if options.keeps_rows and resources.has_local_models:  # whose sampling is part of what rows ask for
            finished_rows(name, rows.of_part(part), resume=True)
    return len(rows.of_part(options.part))


def _check_serve(resources: BatchResources) -> None:
    """Raise for what `trtrun serve` would refuse."""
    from trtrun.start.job_spec import JobSpec

    check_extra()
    if resources.has_local_models:
        check_served(JobSpec(resources.config))
        _check_weights(resources)


def _place_words(config: RuntimeConfig) -> Sequence[str]:
    """What has a server whose place nobody has named listen on a socket: jobs of others may have the usual ports, and
    whoever is on the node could ask it."""
    return () if config.server.model_fields_set & PLACES else ("--uds", "auto")


def _check_training(inner: Inner, resources: BatchResources) -> Path:
    """Raise for what `trtrun train-drafter --resume` would refuse; returns the file with a line for each step."""
    from launch.train.checks import check_training
    from trtrun.start.job_spec import JobSpec
    from trtrun.tools.training.state import StateFile

    options = train_options({**inner.parameters, "resume": True})
    if resources.has_local_models:
        check_training(JobSpec(resources.config), options)
    return StateFile(options.output.resolve()).metrics_path


def _check_weights(resources: BatchResources) -> None:
    """Raise for weights that can be seen from here and that the job would refuse; tell those that it may refuse."""
    from launch.jobs.check.preflight import check_visible_weights
    from trtrun.start.job_spec import JobSpec

    to_come = set(resources.hosts) - set(resources.named)
    for text in check_visible_weights(JobSpec(resources.config), to_come):
        print(f"trtrun: {text}", file=sys.stderr, flush=True)


def _outputs(options: RunOptions, array: Array | None) -> Iterator[tuple[str, Part | None]]:
    """The output files of all jobs, each with its share of the rows."""
    if options.output is None:
        return
    if array is None:
        yield options.output, options.part
        return
    for number in range(1, array.count + 1):
        yield str(part_path(options.output, number, array.count)), Part(number, array.count)


def _options(command: click.Command, words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The options of a command line, each with the words that belong to it; other words have no option before them."""
    takes_value = {
        name for item in command.params if isinstance(item, click.Option) and not item.is_flag for name in item.opts
    }
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in takes_value else None
        yield word, (word,) if value is None else (word, value)


def _without(inner: Inner, option: str) -> Iterator[str]:
    """The words of a command line without one of its options."""
    for word, words in _options(inner.command, inner.rest):
        if word != option and not word.startswith(f"{option}="):
            yield from words
