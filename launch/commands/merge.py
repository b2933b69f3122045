"""`trtrun merge`: parse its command line."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launch.commands.prompts import given_sampling, with_prompts
from launch.exit_codes import ExitCode, describe_exit_codes


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
