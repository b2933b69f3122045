"""Options that several subcommands share, and how they become a configuration and this process's log."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from typing_extensions import override

from launch.commands.model_options import KEYS, config_words, print_configuration, settle, tell_choices, with_model
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.process_sections import ServerSection
from trtrun.configuration.topology import make_topology
from trtrun.configuration.yaml_source import read_values

Command = TypeVar("Command", bound=Callable[..., Any])

WITHOUT_MODEL = ("train_drafter",)
"""Commands that need a YAML file."""

STARTERS = ("run", "generate_data", "train_drafter", "bench", "check", "serve", "serve_engine", "warm_up")
"""Commands that start ranks, and so have logs."""


class FiniteRange(click.FloatRange):
    """A number of a range, and neither infinite nor none at all: a range without an end, or any, takes these."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number", param, ctx)
        return number


_VERBOSITY = "verbosity"
_LOG_DIRECTORY = "log_directory"


def with_sources(command: Command) -> Command:
    """Add --config, --set and --speculation, and MODEL with its options, from which `settle` makes a configuration."""
    takes_model = command.__name__ not in WITHOUT_MODEL
    options = (
        click.option(
            "--config",
            "config_path",
            required=not takes_model,
            type=click.Path(path_type=Path),
            help="YAML file: models, devices, speculation, KV cache, scheduler."
            + (" Without one: MODEL, a directory, org/name of the Hugging Face cache, or asset:target." * takes_model),
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any key of the YAML file, such as speculation.draft_len=8. May be repeated.",
        ),
        click.option(
            "--speculation",
            *(("--method",) if takes_model else ()),
            "speculation",
            type=click.Choice(list(METHODS)),
            help="Short for --set speculation.method=…; none runs the target alone.",
        ),
    )
    return _add(options, with_model(command) if takes_model else command)


def with_config(command: Command) -> Command:
    """Add what `with_sources` does, and to commands that start ranks -v and --log-dir.

    The command gets `config_path`, which is COMMAND_LINE without a file, and `overrides`, in which --speculation, its
    other parameters and what was chosen stand as well. -v and --log-dir are no arguments of it: `load` finds them in
    click's context.
    """
    if command.__name__ in STARTERS:
        command = _add(_LOG_OPTIONS, command)
    return with_sources(_settling(command))


def _add(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    context.meta[str(parameter.name)] = value


_LOG_OPTIONS = (
    click.option(
        "-v",
        "--verbose",
        _VERBOSITY,
        count=True,
        expose_value=False,
        callback=_keep,
        help="Show what every rank logs; -vv shows everything, and what libraries say.",
    ),
    click.option(
        "--log-dir",
        _LOG_DIRECTORY,
        metavar="DIR",
        expose_value=False,
        callback=_keep,
        help="Keep a log file of each rank there.  [default: launch.log_directory]",
    ),
)


def _settling(command: Command) -> Command:
    """The command behind its configuration: it begins once that is settled."""

    @wraps(command)
    def begin(
        config_path: Path | None,
        overrides: tuple[str, ...],
        speculation: str | None,
        print_config: bool = False,
        **others: Any,
    ) -> int:
        settled = settle(config_path, overrides, speculation, others)
        others = {name: value for name, value in others.items() if name not in KEYS}
        if print_config:
            print_configuration(settled, server_overrides(others))
            return 0
        tell_choices(settled)
        return int(command(config_path=settled.path, overrides=settled.overrides, **others))

    return cast(Command, begin)


def server_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """The changes of the YAML file that options of `trtrun serve` make."""
    names = [name for name in parameters if name in ServerSection.model_fields and parameters[name] not in (None, ())]
    return [f"server.{name}={json.dumps(parameters[name])}" for name in names]


def load(
    path: Path,
    overrides: Sequence[str],
    is_frontend: bool = False,
    place_ranks: Callable[[RuntimeConfig], Topology] = make_topology,
    read: Callable[[Path, Sequence[str]], dict[str, Any]] = read_values,
) -> RuntimeConfig:
    """The configuration of this run, the same on every rank. Inside a command that starts ranks, logging begins here.

    Args:
        path: of the YAML file.
        overrides: `key=value` texts.
        is_frontend: whether this process is the frontend of a server, and so never a rank.
        place_ranks: who sits where.
        read: of the path and the overrides makes what the file holds.

    Raises:
        TrtrunError: one line that names the file and the key, or the log file that cannot be written.
    """
    from launch.commands.schedulers import check_batch_sections
    from launch.jobs.placement.run_config import load_run_config

    context = click.get_current_context(silent=True)
    options = context.meta if context is not None else {}
    if _VERBOSITY not in options:
        return load_run_config(path, overrides, check_batch_sections, place_ranks, read)
    if options[_LOG_DIRECTORY] is not None:
        overrides = [*overrides, f"launch.log_directory={json.dumps(options[_LOG_DIRECTORY])}"]
    from launch.jobs.logs import quiet_libraries

    quiet_libraries(options[_VERBOSITY])
    config = load_run_config(path, overrides, check_batch_sections, place_ranks, read)
    _begin_log(path, config, place_ranks(config), options[_VERBOSITY], is_frontend)
    return config


def shared_options(path: Path, overrides: Sequence[str]) -> list[str]:
    """The words by which another command reads the same configuration, and logs alike. Inside a command that starts
    ranks."""
    options = click.get_current_context().meta
    log_directory = [] if options[_LOG_DIRECTORY] is None else ["--log-dir", options[_LOG_DIRECTORY]]
    return [*config_words(path, overrides), *["-v"] * options[_VERBOSITY], *log_directory]


def _begin_log(path: Path, config: RuntimeConfig, topology: Topology, verbosity: int, is_frontend: bool) -> None:
    from launch.jobs.logs import find_front, find_speaker, set_up_logging
    from launch.jobs.placement.allocation import find_local
    from parallel.mpi_rank import find_mpi_rank

    speaker = find_front() if is_frontend else find_speaker(topology, find_mpi_rank())
    # A launcher on another host than the ranks' need not have their directory.
    has_directory = is_frontend or speaker.rank is not None or find_local(topology.hosts) is not None
    set_up_logging(speaker, verbosity, config.launch.log_directory if has_directory else None)
    logger = logging.getLogger(__name__)
    if not speaker.rank:
        places = ", ".join(topology.describe(rank) for rank in range(topology.world_size))
        logger.info("%s: %d ranks: %s", path, topology.world_size, places)
    for name, section in (("target", config.target), ("draft", config.draft)):
        # A worker tells the directory of its own engine: they may differ from host to host.
        if section is not None and (not speaker.rank or name in speaker.role):
            logger.info("%s: %s", name, section.model)
    if config.heads is not None and (not speaker.rank or ("draft" if config.heads_apart else "target") in speaker.role):
        logger.info("heads: %s", config.heads.model)
