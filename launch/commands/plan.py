"""`trtrun plan`: parse its command line."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.common import load, with_config


@click.command()
@with_config
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(config_path: Path, overrides: tuple[str, ...], speculation: str | None, as_json: bool) -> int:
    """Show each rank's host, device, role, bytes and KV tokens, and the mpirun command, without loading weights."""
    from launch.job import Job

    arguments = ["run", "--config", str(config_path), *(word for value in overrides for word in ("--set", value))]
    if speculation is not None:
        arguments += ["--speculation", speculation]
    job = Job(load(config_path, overrides, speculation), [*arguments, "--prompt", "TEXT"])
    from launch.plan import make_plan, print_plan

    print_plan(make_plan(job), as_json)
    return 0
