"""The commands that run rows: `trtrun run`, `trtrun generate-data`, `trtrun merge`, which joins outputs of parts, and
`trtrun warm-up`, which starts the same job for its caches alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from launch.batch.options import Part, RunOptions, SampledShare
from launch.commands.common import FiniteRange, load, with_config
from launch.commands.model_options import rank_words
from launch.commands.prompts import given_sampling, parse_part, with_prompts
from launch.exit_codes import ExitCode, describe_exit_codes
from launch.jobs.mpi.drain import Drain, EndedAtStart, ending_at_once, leave_starting_ranks


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@with_config
@click.option("--output", metavar="FILE.jsonl", help='Write one row for each prompt, in input order ("-": stdout).')
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run finished in --output; run the rest.")
@click.option(
    "--part",
    metavar="I/N",
    callback=parse_part,
    help="Run the I-th of N shares of the rows; `trtrun merge` joins the outputs.",
)
@with_prompts
def run(
    config_path: Path,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    output: str | None,
    resume: bool,
    part: Part | None,
    **sampling: object,
) -> int:
    """Complete prompts.

    Started plainly it starts mpirun itself where the devices need several ranks. Sampling options hold for rows that do
    not name their own. With --output FILE.jsonl a first SIGINT, SIGTERM or SIGUSR1 drains the run: prompts in flight
    have launch.drain_seconds to finish, the rest is left for --resume.
    """
    options = RunOptions(prompts, prompts_file, output, given_sampling(sampling), resume, part)
    if not prompts and prompts_file is None:
        raise click.UsageError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")
    if resume and output in (None, "-"):
        raise click.UsageError("--resume needs --output FILE.jsonl, the file to go on with")
    return run_rows(config_path, overrides, options)


def run_rows(config_path: Path, overrides: Sequence[str], options: RunOptions) -> int:
    """This process's part of a run of rows, and what becomes of it when a signal asks for an early end."""
    drain = Drain()
    if not options.keeps_rows:
        with ending_at_once():
            return _run(config_path, overrides, options, drain)
    try:
        with drain.listening():
            status = _run(config_path, overrides, options, drain)
    except EndedAtStart:
        line = f"drained after {drain.cause} before any prompt was begun; the same command with --resume runs them"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)
        status = ExitCode.DRAINED
    if drain.has_interrupted and status == ExitCode.DRAINED:
        leave_starting_ranks()
    return status


def _run(config_path: Path, overrides: Sequence[str], options: RunOptions, drain: Drain) -> int:
    """This process's part, once it hears the signals that may end it."""
    from launch.jobs.mpi.job import Job

    job = Job(load(config_path, overrides), rank_words(), drains=options.keeps_rows)

    def check() -> None:
        from launch.batch.checks import check_models, check_rows, finish_without_models
        from parallel.mpi_rank import find_mpi_rank

        checked = check_rows(options, job.config)
        # Ranks that are started already have to agree that nothing is left: that is play_run's part.
        finished = finish_without_models(options, checked) if find_mpi_rank() is None else None
        if finished is not None:
            raise click.exceptions.Exit(finished)
        check_models(job, checked)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.batch.run import play_run

    return play_run(job.spec, options, drain)


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@click.option("--output", required=True, metavar="FILE.jsonl", help='The file to make ("-": stdout).')
@with_prompts
@click.argument("parts", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PART.jsonl…")
def merge(
    output: str, prompts: tuple[str, ...], prompts_file: Path | None, parts: tuple[Path, ...], **sampling: object
) -> int:
    """Join the outputs of `trtrun run --part` in input order.

    Every row must be there, and no part may be unfinished. With --prompts and the sampling options of the runs it also
    makes sure that the rows are this input's, to the last one.
    """
    from launch.batch.merge import merge_parts

    given = given_sampling(sampling)
    rows = None
    if prompts or prompts_file is not None:
        from launch.batch.input import InputRows

        rows = InputRows(prompts, prompts_file, given)
    elif given:
        raise click.UsageError("sampling options are compared with the rows of --prompts FILE.jsonl: give that too")
    merged = merge_parts(output, parts, rows, prompts_file)
    line = f"merged {len(parts)} parts: {merged.num_rows} rows"
    line += f", {merged.num_refused} of them refused" if merged.num_refused else ""
    if not merged.is_end_known:
        line += "; none tells how many rows the input has: give --prompts, to be sure that none is missing at the end"
    print(f"trtrun: {line}", file=sys.stderr, flush=True)
    return ExitCode.ROWS_REFUSED if merged.num_refused else ExitCode.DONE


@click.command()
@with_config
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Put compiled kernels below this folder.  [default: each cache's own folder, below the user's]",
)
def warm_up(config_path: Path, overrides: tuple[str, ...], cache: Path | None) -> int:
    """Start the job without its weights, for its compiled kernels and measurements: later starts find them.

    For container images and batch jobs on many nodes. It needs the devices of the job and the models' config.json, and
    ends when the job is ready. What is compiled holds for GPUs of one kind and one version of trtrun, torch and Triton.
    """
    from launch.batch.warm_up import CACHES, play_warm_up, without_weights
    from launch.jobs.mpi.job import Job

    if cache is not None:
        for variable, folder in CACHES.items():  # on each rank, before anything reads them
            os.environ[variable] = str(cache.resolve() / folder)
    job = Job(without_weights(load(config_path, overrides)), rank_words())

    def check() -> None:
        from launch.jobs.check.preflight import check_job

        check_job(job.spec)

    status = job.enter(check)
    if status is not None:
        return status
    return play_warm_up(job.spec, cache)


@click.command("generate-data", epilog=f"Exit status: {describe_exit_codes()}")
@with_config
@click.option(
    "--prompts",
    "prompts_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Rows {"prompt": "…"}, {"prompt_token_ids": […]} or {"messages": […]}, with any sampling parameter.',
)
@click.option("--output", required=True, metavar="FILE.jsonl", help="Write one row for each prompt, in input order.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run finished in --output; run the rest.")
@click.option("--part", metavar="I/N", callback=parse_part, help="Run the I-th of N shares of the rows.")
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Most tokens to generate for a prompt.")
@click.option(
    "--sampled-share",
    type=FiniteRange(0, 1),
    default=0.5,
    show_default=True,
    help="Share of the rows that are sampled; the others are greedy.",
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="Of sampled rows.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Of sampled rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first row; each row behind has the next.")
def generate_data(config_path: Path, overrides: tuple[str, ...], **values: Any) -> int:
    """Let the target answer prompts, as data for `trtrun train-drafter`.

    It runs like `trtrun run`: speculative or plain, on any number of ranks, with a drain at the first signal. A row
    that names its own sampling parameters keeps them.
    """
    return run_rows(config_path, overrides, data_options(values))


def data_options(values: Mapping[str, Any]) -> RunOptions:
    """What the parameters of the command ask for.

    Raises:
        click.UsageError: the output is no file, which keeps rows.
    """
    sampled = SampledShare(values["sampled_share"], values["temperature"], values["seed"])
    sampling: dict[str, object] = {name: values[name] for name in ("max_tokens", "top_p")}
    options = RunOptions(
        (), values["prompts_file"], values["output"], sampling, values["resume"], values["part"], sampled
    )
    if not options.keeps_rows:
        raise click.UsageError("--output needs a file, which keeps the rows for train-drafter")
    return options
