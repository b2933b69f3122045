"""`trtrun serve`, `trtrun serve-engine`, the program that it starts for the ranks, and `trtrun chat`, which talks to a
server or starts one.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from launch.commands.common import load, server_overrides, shared_options, with_config, with_sources
from launch.commands.model_options import KEYS, print_configuration, rank_words, settle, tell_choices
from launch.commands.prompts import given_sampling
from launch.exit_codes import ExitCode, describe_exit_codes
from launch.migration.command_words import read_words
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import ConfigError, PlacementError, why_unreadable

if TYPE_CHECKING:
    from trtrun.start.job_spec import JobSpec

LIBRARIES = (
    "grpc", "httptools", "prometheus_client", "starlette", "tritonclient", "uvicorn", "uvloop",
)  # fmt: skip
"""What the extra `serve` of setup.py installs."""


class ServeCommand(click.Command):
    """`trtrun serve`, which takes options of `vllm serve` and trtllm-serve as well."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = [name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
        words, reading = read_words(args, own)
        rank = find_mpi_rank()
        if reading.hint is not None and (rank is None or rank.rank == 0):
            print(f"trtrun: {reading.hint}", file=sys.stderr, flush=True)
        return super().parse_args(ctx, words)


@click.command(cls=ServeCommand, epilog=f"Exit status: {describe_exit_codes()}")
@with_config
@click.option("--host", help="Address to listen on.  [default: server.host, 127.0.0.1]")
@click.option("--uds", metavar="F", help="Socket to listen on in place of ports, for this user alone; or auto.")
@click.option("--http-port", type=int, help="Port of the API; 0 takes a free one.  [default: server.http_port, 8000]")
@click.option("--grpc-port", type=int, help="Port of Triton's gRPC; the same.  [default: server.grpc_port, 8001]")
@click.option("--metrics-port", type=int, help="Port of /metrics; the same.  [default: server.metrics_port, 8002]")
@click.option("--allowed-origins", metavar="O", multiple=True, help="Pages whose scripts may ask, or *; several times.")
@click.option("--ping-seconds", type=float, metavar="S", help="Comments in streams after so long without news.")
@click.option("--name-file", metavar="F", help="Says where the server listens; taken over by the next one with it.")
@click.option("--api-key-file", metavar="F", help="One key a line; requests need one of them.")
@click.option("--tls-cert", metavar="F", help="Certificate of the server, in PEM; needs --tls-key.")
@click.option("--tls-key", metavar="F", help="Key of the certificate, in PEM.")
def serve(config_path: Path, overrides: tuple[str, ...], **server: Any) -> int:
    """Serve the OpenAI API and Triton's models over the ranks of a job.

    Options of `vllm serve` and trtllm-serve are taken, with a line on what each is here. Starts the ranks itself, and
    starts them again when they end. Under an mpirun or srun of your own rank 0 serves, and nothing is started again.
    The first SIGINT or SIGTERM drains: requests in work have launch.drain_seconds to finish, new ones are refused. The
    second one ends at once.
    """
    check_extra()
    overrides += tuple(server_overrides(server))
    if find_mpi_rank() is not None:
        return _serve_rank(load(config_path, overrides))
    config = load(config_path, overrides, is_frontend=True)
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
    return play_serve(spec, RestartedEngine(config, engine_command(shared_options(config_path, overrides))))


def _serve_rank(config: RuntimeConfig) -> int:
    """The part of a rank that a user's own mpirun or srun has started."""
    from launch.jobs.mpi.job import Job

    job = Job(config, rank_words())
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
@click.option("--turn", help="Where it says that it is this engine's turn, which has to wait for that.")
@click.option("--awaited", is_flag=True, help="Requests wait for it.")
def serve_engine(config_path: Path, overrides: tuple[str, ...], socket: str, turn: str | None, *, awaited: bool) -> int:
    """The ranks behind `trtrun serve`, which starts this."""
    from launch.jobs.mpi.job import Job

    job = Job(load(config_path, overrides), rank_words())
    status = job.enter(lambda: None)  # the frontend has checked it
    if status is not None:
        return status
    from launch.serve.engine.process import play_engine

    return play_engine(replace(job.spec, is_awaited=awaited), socket, turn)


def check_extra() -> None:
    """Raise ConfigError where a library is missing that the extra `serve` installs."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        told = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ConfigError(
            f"trtrun serve needs the extra 'serve', of which {told}: "
            "pip install 'trtrun[serve]', or scripts/install.sh serve"
        )


_OF_REQUESTS = ("max_tokens", "temperature", "top_p", "seed", "draft_len", "chat_template_kwargs")


def _parse_object(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """An object of JSON; None where the option is not given."""
    try:
        found = None if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r} is no JSON ({error})") from None
    if found is not None and not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is no object: write such as '{{\"enable_thinking\": false}}'")
    return found


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@with_sources
@click.option(
    "--url",
    metavar="URL",
    help="A server that runs: http://127.0.0.1:8000, unix:///PATH or its server.name_file.",
)
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="F", help="With that server's key.")
@click.option("--system", metavar="TEXT", help="What the system is told.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: to the context's end]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: what the model says, else 1]")
@click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability.")
@click.option("--seed", type=int, help="Makes sampled answers repeatable.")
@click.option("--draft-len", type=int, metavar="K", help="Most draft tokens a round; 0 is plain decoding.")
@click.option(
    "--chat-template-kwargs",
    callback=_parse_object,
    metavar="JSON",
    help="Further values for the chat template, such as '{\"enable_thinking\": false}'.",
)
def chat(
    config_path: Path | None,
    url: str | None,
    api_key_file: Path | None,
    overrides: tuple[str, ...],
    speculation: str | None,
    system: str | None,
    print_config: bool,
    **values: Any,
) -> int:
    """Talk to a model in the terminal.

    For a MODEL, or with --config, a server is started for the conversation, on any number of ranks, and ends with it.
    With --url one that runs is asked. Answers stream, with their speed and the share of accepted draft tokens; Ctrl-C
    stops one. Without a terminal each line of the input is a message.
    """
    from launch.chat.client import ChatClient
    from launch.chat.own_server import own_server
    from launch.chat.session import Session

    if url is not None:
        if config_path is not None or values["model"] is not None:
            raise click.UsageError("give MODEL, --config FILE, or --url URL of a server that runs, one of the three")
        if overrides or speculation is not None or any(values.get(name) is not None for name in KEYS):
            raise click.UsageError("--set, --speculation and devices are of a job: a server that runs has its own")
        key = None if api_key_file is None else _read_key(api_key_file)
        find_url = None if "://" in url else partial(_read_url, Path(url))
        client = ChatClient(url if find_url is None else find_url(), key, find_url)
        serving: AbstractContextManager[ChatClient] = nullcontext(client)
    else:
        if api_key_file is not None:
            raise click.UsageError("--api-key-file is of a server that runs, with --url")
        settled = settle(config_path, overrides, speculation, values)
        if print_config:
            print_configuration(settled)
            return ExitCode.DONE
        _check_template(load(settled.path, settled.overrides))
        tell_choices(settled)
        serving = own_server(settled.words)
    with serving as client:
        client.look()
        Session(client, system, _options(values)).run()
    return ExitCode.DONE


def _check_template(config: RuntimeConfig) -> None:
    """Raise ConfigError for a model without chats, as far as its files are here: before it is loaded."""
    from launch.chat.client import NO_TEMPLATE
    from trtrun.chats.chat_template import read_chat_template

    directory = config.tokenizer or config.target.model
    if directory.is_dir() and read_chat_template(directory) is None:
        raise ConfigError(NO_TEMPLATE)


def _options(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name, value in given_sampling(values).items() if name in _OF_REQUESTS}


def _read_url(path: Path) -> str:
    """Where the server of a name listens by now."""
    from launch.serve.handover.name_file import NameFile

    name = NameFile(path).read_name()
    if name is None:
        raise ConfigError(f"--url must be such as http://127.0.0.1:8000, or a server.name_file, not {str(path)!r}")
    return name.url


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {why_unreadable(error)}") from None
