"""`trtrun bench`: parse its command line and play this process's part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from launch.commands.common import load, with_config


@click.command()
@with_config
@click.option("--rows", default="1,4,16", show_default=True, help="Numbers of prompts that run together.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Tokens for each prompt.")
@click.option("--prompt-tokens", default=32, show_default=True, type=click.IntRange(1), help="Length of each prompt.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Medians are over these.")
@click.option("--peer", type=click.Choice(["transformers"]), help="Measure this on the same weights and prompts too.")
@click.option("--seed", type=click.IntRange(0), help="Of the random prompts.  [default: drawn, and printed]")
@click.option("--trace", metavar="F", help="Write a trace of the timed runs' rounds to this file, for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def bench(
    config_path: Path, overrides: tuple[str, ...], speculation: str | None, rows: str, as_json: bool, **others: Any
) -> int:
    """Measure plain and speculative decoding in one run, on fresh random prompts; the last line is JSON."""
    from launch.batch.options import BenchOptions
    from launch.mpi.job import Job

    counts = tuple(int(part) for part in rows.split(",") if part.strip().isdecimal() and int(part) > 0)
    if not counts or len(counts) != len(rows.split(",")):
        raise click.BadParameter("write numbers with commas between, such as 1,4,16", param_hint="'--rows'")
    job = Job(load(config_path, overrides, speculation), sys.argv[1:])
    options = BenchOptions(rows=counts, as_json=as_json, **others)

    def check() -> None:
        from launch.bench.bench import check_bench

        check_bench(job, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.bench.bench import play_bench

    return play_bench(job, options)
