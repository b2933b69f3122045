"""`trtrun run`: parse its command line and play this process's part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from launch.batch.options import Part, RunOptions
from launch.commands.common import load, with_config
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
    speculation: str | None,
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
    return run_rows(config_path, overrides, speculation, options)


def run_rows(config_path: Path, overrides: Sequence[str], speculation: str | None, options: RunOptions) -> int:
    """This process's part of a run of rows, and what becomes of it when a signal asks for an early end."""
    drain = Drain()
    if not options.keeps_rows:
        with ending_at_once():
            return _run(config_path, overrides, speculation, options, drain)
    try:
        with drain.listening():
            status = _run(config_path, overrides, speculation, options, drain)
    except EndedAtStart:
        line = f"drained after {drain.cause} before any prompt was begun; the same command with --resume runs them"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)
        status = ExitCode.DRAINED
    if drain.has_interrupted and status == ExitCode.DRAINED:
        leave_starting_ranks()
    return status


def _run(
    config_path: Path, overrides: Sequence[str], speculation: str | None, options: RunOptions, drain: Drain
) -> int:
    """This process's part, once it hears the signals that may end it."""
    from launch.jobs.mpi.job import Job

    job = Job(load(config_path, overrides, speculation), sys.argv[1:], drains=options.keeps_rows)

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
