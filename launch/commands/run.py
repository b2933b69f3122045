"""`trtrun run`: parse its command line and play this process's part."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launch.commands.common import load, with_config


@click.command()
@with_config
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt. May be repeated.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Rows {"prompt": "…"} or {"prompt_token_ids": […]}, with any sampling parameter.',
)
@click.option("--output", metavar="FILE.jsonl", help='Write one row for each prompt, in input order ("-": stdout).')
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run finished in --output; run the rest.")
@click.option("--max-tokens", type=int, help="Most tokens to generate for each prompt.  [default: 128]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 0]")
@click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability.")
@click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest.")
@click.option("--seed", type=int, help="Makes sampled output repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text. May be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end of text.")
def run(
    config_path: Path,
    overrides: tuple[str, ...],
    speculation: str | None,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    output: str | None,
    resume: bool,
    **sampling: object,
) -> int:
    """Complete prompts.

    Started plainly it starts mpirun itself where the devices need several ranks. Sampling options hold for rows that do
    not name their own. Exit status: 0; 1 when a row was refused (its reason is in the row's `error`); 2 when nothing
    could run.
    """
    from launch.job import Job
    from launch.options import RunOptions

    given = {name: value for name, value in sampling.items() if value is not None and value != ()}
    options = RunOptions(prompts, prompts_file, output, given, resume)
    if not prompts and prompts_file is None:
        raise click.UsageError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")
    if resume and output in (None, "-"):
        raise click.UsageError("--resume needs --output FILE.jsonl, the file to go on with")
    job = Job(load(config_path, overrides, speculation), sys.argv[1:])

    def check() -> None:
        from launch.mpirun import find_place
        from launch.run import check_run, finish_resumed

        # Ranks that are started already have to agree that nothing is left: that is play_run's part.
        finished = finish_resumed(options) if resume and find_place() is None else None
        if finished is not None:
            raise click.exceptions.Exit(finished)
        check_run(job, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.run import play_run

    return play_run(job.config, options)
