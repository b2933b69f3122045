"""`trtrun check`: parse its command line and play this process's part."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launch.commands.common import load, with_config


@click.command()
@with_config
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(config_path: Path, overrides: tuple[str, ...], speculation: str | None, as_json: bool) -> int:
    """Start the ranks without weights and prove that they can do the job.

    Every rank must be on its host, with one version of the software, its device, its model directory and enough memory;
    every link between ranks is tried with checksummed messages, and timed. Engines are read whole and compared with
    what was built. Ends within launch.check_seconds, and a second for each 100 MB of engines, and names the ranks that
    are stuck by then.
    """
    from launch.jobs.mpi.job import Job
    from launch.jobs.mpi.start_progress import has_parent

    job = Job(load(config_path, overrides, speculation), sys.argv[1:], is_check=True)

    def preflight() -> None:
        from launch.jobs.check.preflight import check_job

        if not has_parent():  # else it has said so
            check_job(job.spec)

    status = job.enter(preflight)
    if status is not None:
        return status
    from launch.jobs.check.rank_check import play_check

    return play_check(job.spec, as_json)
