"""Options that several subcommands share, and how they become a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from trtrun.config import RuntimeConfig

Command = TypeVar("Command", bound=Callable[..., Any])


def with_config(command: Command) -> Command:
    """Add --config, --set and --speculation."""
    options = (
        click.option(
            "--config",
            "config_path",
            required=True,
            type=click.Path(path_type=Path),
            help="YAML file: models, devices, speculation, KV cache, scheduler.",
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
            type=click.Choice(["draft_target", "none"]),
            help="Short for --set speculation.method=…; none runs the target alone.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load(path: Path, overrides: Sequence[str], speculation: str | None) -> RuntimeConfig:
    """The configuration of this run, the same on every rank.

    Raises:
        TrtrunError: one line that names the file and the key.
    """
    from launch.source import load_run_config

    extra = [] if speculation is None else [f"speculation.method={speculation}"]
    return load_run_config(path, [*overrides, *extra])
