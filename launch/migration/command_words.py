"""A command line of `vllm serve` or trtllm-serve in the words of `trtrun serve`, with a hint at each.

It knows which words belong together, and nothing of what the options mean: that is serving_flags.py. A
configuration of TensorRT-LLM's (--extra_llm_api_options) is read by it as well, as its fields have the options' names.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from launch.jobs.plan.yaml_text import flow
from launch.migration.flags import Changes, Flag, Takes
from launch.migration.serving_flags import BY_NAME, FIELDS, normal_name
from trtrun.configuration.yaml_source import parse_yaml
from trtrun.errors import nearest, shorten_path, why_unreadable

API_OPTIONS = "--extra-llm-api-options"
ONE_FIELD = "--speculative-config."
"""How vLLM takes one field of it."""

OWN_OPTIONS = {
    "target.devices": "--devices",
    "draft.model": "--draft",
    "draft.devices": "--draft-devices",
    "speculation.method": "--method",
    "speculation.draft_len": "--draft-len",
    "scheduler.max_batch_size": "--max-batch-size",
    "scheduler.max_seq_len": "--max-seq-len",
    "server.http_port": "--http-port",
    "server.grpc_port": "--grpc-port",
    "server.metrics_port": "--metrics-port",
    "server.tls_key": "--tls-key",
    "server.tls_cert": "--tls-cert",
}
"""Options of `trtrun serve` by their keys."""


@dataclass
class Reading:
    """What options of other servers came to.

    Attributes:
        changes: values by key.
        told: for each option that set something, what it is here.
        idle: for each other one, why there is nothing to do.
        show: the words in which changes are told.
    """

    changes: Changes = field(default_factory=dict)
    show: Callable[[Changes], list[str]] = field(default_factory=lambda: own_words)
    told: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def add(self, name: str, flag: Flag, given: Any) -> None:
        """Read one option.

        Raises:
            click.UsageError: it is refused, or cannot be read.
        """
        changes, says = flag.change(name, given), "so in any case" if flag.refuses else flag.says
        self.changes |= changes
        if changes:
            self.told.append(f"{name} is {shlex.join(self.show(changes))}" + f" ({says})" * bool(says))
        else:
            self.idle.append(f"{name} (nothing to do{': ' * bool(says)}{says})")

    def add_api_options(self, path: Path) -> None:
        """Read a YAML file of TensorRT-LLM's LLM API.

        Raises:
            TrtrunError, click.UsageError: it cannot be read, or a field is refused or not known.
        """
        for name, value in read_fields(path, "max_batch_size: 8").items():
            if name in FIELDS:
                self.add(name, FIELDS[name], value)
            elif (option := normal_name(f"--{name}")) not in BY_NAME:
                known = [*FIELDS, *(other[2:].replace("-", "_") for other in BY_NAME if other.startswith("--"))]
                raise click.UsageError(f"unknown field {name!r}{nearest(name, known)}")
            elif value is not None:
                self.add(name, BY_NAME[option], value)

    @property
    def hint(self) -> str | None:
        """One line on all of them; None where there were none."""
        parts = [*self.told, *self.idle]
        return f"here {'; '.join(parts)}" if parts else None


def read_fields(path: Path, such_as: str) -> dict[str, Any]:
    """The fields of a YAML file that an option names.

    Args:
        path: of the file.
        such_as: a field, for people who have written something else.

    Raises:
        ConfigError: it is no YAML.
        click.UsageError: it cannot be read, or holds no fields.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot read {shorten_path(path)}: {why_unreadable(error)}") from None
    fields = parse_yaml(text, str(path))
    if not isinstance(fields, dict):
        raise click.UsageError(f"{path}: write fields, such as {such_as}")
    return fields


def read_words(words: Sequence[str], own: Collection[str]) -> tuple[list[str], Reading]:
    """The words of `trtrun serve` for a command line that may have options of others.

    Args:
        words: behind `serve`.
        own: options of `trtrun serve`, which stay as they are.

    Raises:
        TrtrunError, click.UsageError: an option is refused, lacks its value, or its value cannot be read.
    """
    kept: list[str] = []
    speculative: dict[str, object] = {}
    reading = Reading()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        normal = normal_name(name)
        listed = normal == "--allowed-origins" and (value or (rest or [""])[0]).startswith("[")
        if normal == "--model":
            kept.append(_take(word, rest))
        elif normal.startswith(ONE_FIELD):
            field_name = normal.removeprefix(ONE_FIELD).replace("-", "_")
            speculative[field_name] = parse_yaml(_take(word, rest), name)
        elif normal == API_OPTIONS:
            reading.add_api_options(Path(_take(word, rest)))
        elif (found := _find(normal)) is None or (name in own and not listed):
            kept.append(word)
        else:
            flag, is_on = found
            given: list[object] = [is_on if flag.takes is Takes.NONE else _take(word, rest)]
            while flag.takes is Takes.MANY and not equals and rest and not rest[0].startswith("-"):
                given.append(rest.pop(0))
            reading.add(name, flag, given if flag.takes is Takes.MANY else given[0])
    if speculative:
        reading.add(ONE_FIELD[:-1], BY_NAME[ONE_FIELD[:-1]], speculative)
    return [*own_words(reading.changes), *kept], reading


def own_words(changes: Mapping[str, object]) -> list[str]:
    """Options of `trtrun serve` for values of keys."""
    words: list[str] = []
    for key, value in changes.items():
        if key not in OWN_OPTIONS:
            words += ["--set", f"{key}={flow(value)}"]
        else:
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [OWN_OPTIONS[key], shown]
    return words


def _find(name: str) -> tuple[Flag, bool] | None:
    """The flag of a name, and whether it is switched on; None where there is none."""
    if name in BY_NAME:
        return BY_NAME[name], True
    flag = BY_NAME.get("--" + name.removeprefix("--no-"))
    return (flag, False) if name.startswith("--no-") and flag is not None and flag.takes is Takes.NONE else None


def _take(word: str, rest: list[str]) -> str:
    """The value of an option: behind its sign, or the next word."""
    name, equals, value = word.partition("=")
    if not equals and not rest:
        raise click.UsageError(f"{name} needs a value")
    return value if equals else rest.pop(0)
