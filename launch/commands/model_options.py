"""A job without a YAML file: MODEL and the keys that most jobs set, as words of the command line.

Each option stands for a key of the YAML file and becomes an override of it. What is left open without a file is chosen
for this host (launch/jobs/plan/proposal.py) and told in one line. It does not know commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.device_lists import parse_devices
from trtrun.configuration.yaml_source import COMMAND_LINE, read_values

if TYPE_CHECKING:
    from launch.jobs.plan.proposal import Choice

Command = TypeVar("Command", bound=Callable[..., Any])

KEYS = {
    "model": "target.model",
    "draft": "draft.model",
    "devices": "target.devices",
    "draft_devices": "draft.devices",
    "most_drafted": "speculation.draft_len",
    "max_batch_size": "scheduler.max_batch_size",
    "max_seq_len": "scheduler.max_seq_len",
}
"""Keys that parameters stand for."""

OF_ROWS = "draft_len"
"""The parameter of commands that have a --draft-len for each request: without a file it is the job's as well."""

_CHOSEN = "chosen"


def read_devices(context: click.Context, option: click.Parameter, value: str | None) -> list[int | str] | None:
    """The callback of an option that takes devices between commas."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    try:
        devices = [int(word) if word.isascii() and word.isdecimal() else word for word in words]
        names = parse_devices(devices)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return [device if isinstance(device, int) else name for device, name in zip(devices, names, strict=True)]


_DRAFT_LEN = click.option(
    "--draft-len", "most_drafted", type=int, metavar="K", help="Tokens drafted in a round; of speculation.draft_len."
)
_OPTIONS = (
    click.argument("model", required=False, metavar="[MODEL]"),
    click.option("--draft", metavar="MODEL", help="Draft model, or directory of heads; of draft.model."),
    click.option(
        "--devices",
        callback=read_devices,
        metavar="D,D",
        help="The target's devices: 0,1 are GPUs, cpu:0 is a CPU slot.  [default: what is here]",
    ),
    click.option(
        "--draft-devices", callback=read_devices, metavar="D,D", help="The draft's devices.  [default: the target's]"
    ),
    _DRAFT_LEN,
    click.option("--max-batch-size", type=int, metavar="N", help="Rows at once; of scheduler.max_batch_size."),
    click.option("--max-seq-len", type=int, metavar="N", help="Tokens of a request; of scheduler.max_seq_len."),
    click.option("--print-config", is_flag=True, help="Print the YAML file that the command line stands for, and end."),
)


def with_model(command: Command) -> Command:
    """Add MODEL and its options; --draft-len only where the command has none of its own."""
    has_own = any(param.name == OF_ROWS for param in getattr(command, "__click_params__", ()))
    for option in reversed(_OPTIONS):
        if not (has_own and option is _DRAFT_LEN):
            command = option(command)
    return command


@dataclass(frozen=True)
class Settled:
    """Where the configuration of a command comes from.

    Attributes:
        path: of the YAML file, or COMMAND_LINE.
        overrides: `key=value` texts: what options stand for, what was chosen, --set, --speculation. The last one holds.
        choices: what was chosen.
    """

    path: Path
    overrides: tuple[str, ...]
    choices: Sequence[Choice] = ()

    @property
    def chosen(self) -> list[str]:
        """What was chosen, as `key=value` texts."""
        return [f"{choice.key}={json.dumps(choice.value)}" for choice in self.choices]

    @property
    def words(self) -> list[str]:
        """The words by which another command of trtrun reads the same."""
        return config_words(self.path, self.overrides)


def settle(
    path: Path | None, overrides: Sequence[str], speculation: str | None, parameters: Mapping[str, Any]
) -> Settled:
    """The configuration that a command line asks for, with what it leaves open chosen where there is no file.

    Args:
        path: of --config.
        overrides: of --set.
        speculation: the method, where an option names it.
        parameters: of the command; those in KEYS count.

    Raises:
        click.UsageError: there is neither a file nor a model, or both.
        TrtrunError: a model is not there, or is not supported.
    """
    overrides = [*overrides, *([] if speculation is None else [f"speculation.method={speculation}"])]
    keys = {**KEYS, OF_ROWS: KEYS["most_drafted"]} if path is None else KEYS
    found = [(key, parameters.get(name)) for name, key in keys.items()]
    given = [f"{key}={json.dumps(value)}" for key, value in found if value is not None]
    if path is not None:
        if parameters.get("model") is not None:
            raise click.UsageError(
                f"{parameters['model']!r} and --config exclude each other: the file names its target (what "
                "TensorRT-LLM has in its --config, trtrun serve takes as --extra_llm_api_options)"
            )
        return Settled(path, (*given, *overrides))
    values = read_values(COMMAND_LINE, [*given, *overrides])
    target = values.get("target")
    if target is None or (isinstance(target, dict) and target.get("model") is None):
        raise click.UsageError("name a model's directory, such as /models/Llama-3.1-8B-Instruct, or --config FILE")
    rank = find_mpi_rank()
    if rank is not None and rank.rank > 0:  # which hears from rank 0 what was chosen
        return Settled(COMMAND_LINE, (*given, *overrides))
    from launch.jobs.plan.proposal import choose_open_keys

    choices = choose_open_keys(values)
    chosen = Settled(COMMAND_LINE, (), choices).chosen
    return Settled(COMMAND_LINE, (*given, *chosen, *overrides), choices)


def tell_choices(settled: Settled) -> None:
    """Say in one line what was chosen, and let `rank_words` know it."""
    click.get_current_context().meta[_CHOSEN] = settled.chosen
    if settled.choices:
        told = ", ".join(f"{choice.key} {_show(choice.value)}" for choice in settled.choices)
        print(f"trtrun: chosen: {told} (--print-config has the reasons)", file=sys.stderr, flush=True)


def rank_words() -> list[str]:
    """The words of this command line for the ranks that it starts: these choose nothing again."""
    name, *rest = sys.argv[1:]
    chosen = click.get_current_context().meta.get(_CHOSEN, ())
    return [name, *(word for change in chosen for word in ("--set", change)), *rest]


def config_words(path: Path, overrides: Sequence[str]) -> list[str]:
    """The words by which a command of trtrun reads a configuration."""
    source = [] if path == COMMAND_LINE else ["--config", str(path)]
    return [*source, *(word for override in overrides for word in ("--set", override))]


def _show(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def print_configuration(settled: Settled, more: Sequence[str] = ()) -> None:
    """Print a configuration as a YAML file that means the same anywhere on this host, once it is found to be one.

    Raises:
        TrtrunError: it is refused.
    """
    from launch.commands.schedulers import check_batch_sections
    from launch.jobs.placement.run_config import load_run_config
    from launch.jobs.plan.yaml_text import render_yaml, with_absolute_models
    from trtrun.configuration.config import RuntimeConfig

    read = read_values(settled.path, [*settled.overrides, *more])
    load_run_config(settled.path, (), check_batch_sections, read=lambda path, overrides: read)
    base = Path.cwd() if settled.path == COMMAND_LINE else settled.path.resolve().parent
    found = with_absolute_models(read, base)
    values = {name: found[name] for name in RuntimeConfig.model_fields if name in found}
    print(render_yaml(values, {choice.key: choice.reason for choice in settled.choices}), end="")
