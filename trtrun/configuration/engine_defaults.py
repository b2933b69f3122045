"""What a configuration takes over from engines that it names: dtype, quantization, and limits in place of defaults; and
what does not fit them is refused.

It knows the YAML file's values before and after they are checked. It does not know what is in an engine beside what it
says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trtrun.configuration.device_lists import kind_of
from trtrun.configuration.drafting.drafting_methods import needs_draft_model
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.configuration.engine_directory import ANYWHERE, EngineDescription, read_engine
from trtrun.configuration.engine_sections import ModelSection, SchedulerSection
from trtrun.configuration.model_paths import find_model
from trtrun.errors import ConfigError, TrtrunError

_SCHEDULER = ("max_batch_size", "max_num_tokens", "max_seq_len")

Engines = Mapping[str, EngineDescription]
"""By role: "target", "draft"."""


def find_engines(values: Mapping[str, Any], base: Path | None, where: str) -> dict[str, EngineDescription]:
    """The engines that a configuration names, of values that nobody has checked: what is wrong with them otherwise is
    for whoever does.

    Args:
        values: of the YAML file.
        base: directory that relative paths are looked for in, before the working directory.
        where: what to call the source in messages.

    Raises:
        ConfigError: what one says of itself is damaged, of another format, or another runtime's.
    """
    found = {}
    for role in ("target", "draft"):
        section = values.get(role)
        model = section.get("model") if isinstance(section, dict) else None
        if not isinstance(model, str | Path) or not str(model):
            continue
        if role == "draft" and not needs_draft_model(values.get("speculation")):
            continue
        try:
            path = find_model(Path(model), base, role)
        except (TrtrunError, ValueError):
            continue
        try:
            engine = read_engine(path)
        except TrtrunError as error:
            raise ConfigError(f"{where}: {role}: {error}") from None
        if engine is not None:
            found[role] = engine
    return found


def take_over(values: Mapping[str, Any], engines: Engines, where: str) -> dict[str, Any]:
    """The values, with what engines say where the YAML file leaves it out.

    Raises:
        ConfigError: it says something else.
    """
    filled = dict(values)
    for role, engine in engines.items():
        section = dict(values[role])
        for key, left_out in (("dtype", (None, "auto")), ("quantization", (None,))):
            given, built = section.get(key), getattr(engine, key)
            if given in left_out:
                section[key] = built
            elif given != built:
                raise ConfigError(
                    f"{where}: {role}.{key}: is {given}, but the engine was built with {built}: leave it out, or build "
                    "another engine"
                )
        filled[role] = section
    scheduler = {} if values.get("scheduler") is None else values["scheduler"]
    if isinstance(scheduler, dict):
        # Without a number it is one elsewhere that may be beyond the limit, such as the target's context.
        given = {key: value for key, value in scheduler.items() if key not in _SCHEDULER or value is not None}
        filled["scheduler"] = {**_defaults(engines), **given}
    return filled


def _defaults(engines: Engines) -> dict[str, int]:
    """Limits of the scheduler that engines have, each the least of them."""
    found = {}
    for key in _SCHEDULER:
        limits = [limit for engine in engines.values() if (limit := getattr(engine.limits, key)) is not None]
        if limits:
            found[key] = min(limits)
    return found


class Drafts(NamedTuple):
    """A row's drafts by a checked configuration: its section, tokens of one at most, and whether they are trees."""

    section: SpeculationSection
    tokens: int
    are_trees: bool


def shorten_drafts(values: Mapping[str, Any], drafts: Drafts, engines: Engines) -> dict[str, Any] | None:
    """The values with a draft_len that the target's engine allows, where the YAML file leaves it out and the method's
    own is longer; None where nothing is to be changed."""
    limit = engines["target"].limits.max_draft_len if "target" in engines else None
    if limit is None or drafts.tokens <= limit or drafts.are_trees or "draft_len" in drafts.section.model_fields_set:
        return None
    given = values.get("speculation")
    return {**values, "speculation": {**(given if isinstance(given, dict) else {}), "draft_len": limit}}


def check_fit(
    sections: Mapping[str, ModelSection | None],
    scheduler: SchedulerSection,
    drafts: Drafts,
    engines: Engines,
    where: str,
) -> None:
    """Refuse a configuration that goes beyond the engines that it names.

    Args:
        sections: of the engines, by role.
        scheduler: its section.
        drafts: of its rows.
        engines: that it names.
        where: what to call the source in messages.

    Raises:
        ConfigError: one line with both numbers.
    """
    for role, engine in engines.items():
        section = sections[role]
        if section is None:
            continue
        if len(section.devices) != engine.tp_size:
            raise ConfigError(
                f"{where}: {role}.devices: the engine was built for {_count(engine.tp_size, 'device')}, not for "
                f"{len(section.devices)}: name as many, or build it again with --tp {len(section.devices)}"
            )
        kind, _, _ = engine.built_for.partition(" ")
        if kind not in (ANYWHERE, kind_of(section.devices[0])):
            raise ConfigError(
                f"{where}: {role}.devices: the engine was built for {engine.built_for}, not for "
                f"{section.devices[0]}: build it again with --device {kind_of(section.devices[0])}"
            )
        for key in _SCHEDULER:
            _check_limit(f"{where}: scheduler.{key}", getattr(scheduler, key), engine, role, key)
    if "target" in engines:
        key = drafts.section.tree_key if drafts.are_trees else "draft_len"
        _check_limit(f"{where}: speculation.{key}", drafts.tokens, engines["target"], "target", "max_draft_len")


def _check_limit(what: str, wanted: int | None, engine: EngineDescription, role: str, key: str) -> None:
    limit = getattr(engine.limits, key)
    if limit is None or wanted is None or wanted <= limit:
        return
    tokens = f"drafts of {wanted} tokens are" if key == "max_draft_len" else f"{wanted} is"
    raise ConfigError(
        f"{what}: {tokens} more than the {role}'s engine was built for ({limit}): lower it, or build it again with "
        f"--{key.replace('_', '-')} {wanted}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
