"""`trtrun generate-data`: parse its command line; what follows is a run of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launch.batch.options import RunOptions, SampledShare
from launch.commands.common import with_config
from launch.commands.prompts import parse_part
from launch.commands.run import run_rows
from launch.exit_codes import describe_exit_codes


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
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Share of the rows that are sampled; the others are greedy.",
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="Of sampled rows.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Of sampled rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first row; each row behind has the next.")
def generate_data(config_path: Path, overrides: tuple[str, ...], speculation: str | None, **values: Any) -> int:
    """Let the target answer prompts, as data for `trtrun train-drafter`.

    It runs like `trtrun run`: speculative or plain, on any number of ranks, with a drain at the first signal. A row
    that names its own sampling parameters keeps them.
    """
    return run_rows(config_path, overrides, speculation, data_options(values))


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
