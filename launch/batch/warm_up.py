"""`trtrun warm-up`: a start with dummy weights, for what it leaves in caches on disk.

It knows a job's start and where caches lie. It does not know what is in them.
"""

from __future__ import annotations

import time
from pathlib import Path

from launch.exit_codes import ExitCode
from launch.jobs.mpi.job import finish_mpi
from trtrun.configuration.config import RuntimeConfig
from trtrun.start.job_spec import JobSpec

CACHES = {"TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": ""}
"""Variables that say where compiled kernels lie, Triton's and those for CPUs, and their folders below another."""


def without_weights(config: RuntimeConfig) -> RuntimeConfig:
    """A job like this one with dummy weights, which are in no file."""
    made_up = {"load_format": "dummy"}
    sections = {"target": config.target, "draft": config.draft}
    changes = {name: section.model_copy(update=made_up) for name, section in sections.items() if section is not None}
    return config.model_copy(update=changes)


def play_warm_up(spec: JobSpec, cache: Path | None) -> int:
    """This rank's part: start, say how long it took, and end.

    Raises:
        StartError: on rank 0, when any rank could not start.
        SystemExit: on worker ranks, with code 0, when the job is over.
    """
    from launch.batch.run import load_llm

    started = time.monotonic()
    with load_llm(spec):
        seconds = time.monotonic() - started
    finish_mpi()
    print(f"ready after {seconds:.1f} s", flush=True)
    if cache is not None:
        variables = " ".join(f"{variable}={cache.resolve() / folder}" for variable, folder in CACHES.items())
        print(f"start jobs that are to find what was compiled with {variables}", flush=True)
    return ExitCode.DONE
