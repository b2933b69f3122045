"""`trtrun warm-up`: parse its command line and play this process's part."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from launch.commands.common import load, with_config


@click.command()
@with_config
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Put compiled kernels below this folder.  [default: each cache's own folder, below the user's]",
)
def warm_up(config_path: Path, overrides: tuple[str, ...], speculation: str | None, cache: Path | None) -> int:
    """Start the job without its weights, for its compiled kernels and measurements: later starts find them.

    For container images and batch jobs on many nodes. It needs the devices of the job and the models' config.json, and
    ends when the job is ready. What is compiled holds for GPUs of one kind and one version of trtrun, torch and Triton.
    """
    from launch.batch.warm_up import CACHES, play_warm_up, without_weights
    from launch.jobs.mpi.job import Job

    if cache is not None:
        for variable, folder in CACHES.items():  # on each rank, before anything reads them
            os.environ[variable] = str(cache.resolve() / folder)
    job = Job(without_weights(load(config_path, overrides, speculation)), sys.argv[1:])

    def check() -> None:
        from launch.jobs.check.preflight import check_job

        check_job(job.spec)

    status = job.enter(check)
    if status is not None:
        return status
    return play_warm_up(job.spec, cache)
