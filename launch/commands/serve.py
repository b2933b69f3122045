"""`trtrun serve`, and `trtrun serve-engine`, the program that it starts for the ranks: parse, and play the part."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launch.commands.common import load, shared_options, with_config
from launch.exit_codes import describe_exit_codes
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.server_config import ServerSection
from trtrun.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    from trtrun.start.job_spec import JobSpec
from trtrun.start.job_spec import JobSpec

LIBRARIES = (
    "grpc", "httptools", "prometheus_client", "starlette", "tritonclient", "uvicorn", "uvloop",
)  # fmt: skip
"""What the extra `serve` of setup.py installs."""


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@with_config
@click.option("--host", help="Address to listen on.  [default: server.host, 127.0.0.1]")
@click.option("--http-port", type=int, help="Port of the API; 0 takes a free one.  [default: server.http_port, 8000]")
@click.option("--grpc-port", type=int, help="Port of Triton's gRPC; the same.  [default: server.grpc_port, 8001]")
@click.option("--metrics-port", type=int, help="Port of /metrics; the same.  [default: server.metrics_port, 8002]")
@click.option("--allowed-origins", metavar="O", multiple=True, help="Pages whose scripts may ask, or *; several times.")
@click.option("--ping-seconds", type=float, metavar="S", help="Comments in streams after so long without news.")
@click.option("--api-key-file", metavar="F", help="One key a line; requests need one of them.")
@click.option("--tls-cert", metavar="F", help="Certificate of the server, in PEM; needs --tls-key.")
@click.option("--tls-key", metavar="F", help="Key of the certificate, in PEM.")
def serve(config_path: Path, overrides: tuple[str, ...], speculation: str | None, **server: Any) -> int:
    """Serve the OpenAI API and Triton's models over the ranks of a job.

    Starts the ranks itself, and starts them again when they end. Under an mpirun or srun of your own rank 0 serves, and
    nothing is started again. The first SIGINT or SIGTERM drains: requests in work have launch.drain_seconds to finish,
    new ones are refused. The second one ends at once.
    """
    from parallel.mpi_rank import find_mpi_rank

    check_extra()
    given = server_overrides(server)
    if find_mpi_rank() is not None:
        return _serve_rank(load(config_path, [*overrides, *given], speculation))
    config = load(config_path, [*overrides, *given], speculation, is_frontend=True)
    from launch.jobs.placement.allocation import is_local
    from launch.serve.application.serve import play_serve
    from launch.serve.engine.keeper import engine_command
    from launch.serve.engine.restarted_engine import RestartedEngine
    from trtrun.start.job_spec import JobSpec

    spec = JobSpec(config)
    if not is_local(spec.topology.host(0)):
        raise PlacementError(f"the orchestrator is on {spec.topology.host(0)}: start trtrun serve there")
    if not sys.platform.startswith("linux"):
        raise PlacementError("trtrun serve needs Linux")
    check_served(spec)
    words = ["--config", str(config_path), *shared_options([*overrides, *given], speculation)]
    return play_serve(spec, RestartedEngine(config, engine_command(words)))


def _serve_rank(config: RuntimeConfig) -> int:
    """The part of a rank that a user's own mpirun or srun has started."""
    from launch.jobs.mpi.job import Job

    job = Job(config, sys.argv[1:])
    status = job.enter(lambda: check_served(job.spec))
    if status is not None:
        return status
    from launch.serve.application.serve import play_serve_rank

    return play_serve_rank(job.spec)


def check_served(spec: JobSpec) -> None:
    """Raise a TrtrunError for what cannot be served."""
    from launch.jobs.check.preflight import check_job

    config = spec.config
    if config.speculation.forced_acceptance is not None:
        raise ConfigError("speculation.forced_acceptance: texts would be nobody's; it is for trtrun bench alone")
    if config.scheduler.max_waiting is not None:
        raise ConfigError(
            "scheduler.max_waiting: a server's queue has its limit in server.max_queue; leave this one out"
        )
    check_job(spec)


@click.command("serve-engine", hidden=True)
@with_config
@click.option("--socket", required=True, help="Where the front listens.")
def serve_engine(config_path: Path, overrides: tuple[str, ...], speculation: str | None, socket: str) -> int:
    """The ranks behind `trtrun serve`, which starts this."""
    from launch.jobs.mpi.job import Job

    job = Job(load(config_path, overrides, speculation), sys.argv[1:])
    status = job.enter(lambda: None)  # the frontend has checked it
    if status is not None:
        return status
    from launch.serve.engine.process import play_engine

    return play_engine(job.spec, socket)


def server_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """The changes of the YAML file that options of `trtrun serve` make."""
    names = [name for name in parameters if name in ServerSection.model_fields and parameters[name] not in (None, ())]
    return [f"server.{name}={json.dumps(parameters[name])}" for name in names]


def check_extra() -> None:
    """Raise ConfigError where a library is missing that the extra `serve` installs."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trtrun serve needs the extra 'serve', of which {', '.join(missing)} is missing: "
            "pip install 'trtrun[serve]', or scripts/install.sh serve"
        )
