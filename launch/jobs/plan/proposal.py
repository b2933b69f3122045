"""What a job without a YAML file leaves open, chosen for this host: who drafts, and which devices compute.

A choice is a key of the configuration with its value, and the reason, for people. It looks at config.json of the models
and at the headers of heads, counts GPUs, and starts nothing. What memory is free it does not know: `trtrun plan` and
the start say what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs.check.preflight import check_models, count_gpus
from launch.jobs.placement.allocation import find_allocation, in_allocation
from trtrun.configuration.config import make_config
from trtrun.configuration.device_lists import parse_devices
from trtrun.configuration.drafting.drafting_methods import METHODS, NO_DRAFTS, needs_draft_model
from trtrun.configuration.model_paths import ASSET_PREFIX, find_model
from trtrun.configuration.yaml_source import COMMAND_LINE
from trtrun.errors import ConfigError, TrtrunError
from trtrun.heads.head_reading import find_heads
from trtrun.start.job_spec import JobSpec

LEAST_SHARE = 2_000_000_000
"""Bytes of weights on each GPU below which a target is not split further by itself: the sums between GPUs would cost
more than is gained. 4 GB on each of four gained (docs/performance.md)."""


@dataclass(frozen=True)
class Choice:
    """A key that was left open.

    Attributes:
        key: with its section, such as `target.devices`.
        value: what a YAML file would hold.
        reason: for people.
    """

    key: str
    value: object
    reason: str


def choose_open_keys(values: Mapping[str, Any], gpus: int | None = None) -> list[Choice]:
    """Choose the drafting method and devices where the values say nothing of them.

    Args:
        values: what a YAML file would hold, with `target.model`. What is wrong with the rest is left to the
            configuration's checks.
        gpus: of a host; None counts those of this one, or of the Slurm job.

    Raises:
        TrtrunError: a model is not there, is not supported, or cannot be split over the devices.
    """
    filled: dict[str, Any] = deepcopy(dict(values))
    choices: list[Choice] = []

    def choose(found: Sequence[Choice]) -> None:
        for choice in found:
            section, _, key = choice.key.partition(".")
            filled[section] = {**(filled.get(section) or {}), key: choice.value}
        choices.extend(found)

    if not all(isinstance(filled.get(name) or {}, dict) for name in ("target", "draft", "speculation")):
        return []
    target = find_model(Path(str(filled["target"]["model"])), Path.cwd(), "MODEL")
    if "method" not in (filled.get("speculation") or {}):
        choose(_choose_method(filled, target))
    method = filled["speculation"]["method"]
    drafted = (filled.get("draft") or {}).get("model")
    if drafted is not None and method in METHODS and not _takes_draft(method):
        raise ConfigError(f"--draft names {drafted}, but method {method} drafts without a model: leave one of them out")
    if "devices" not in filled["target"]:
        choose([_choose_devices(filled, target, count_granted() if gpus is None else gpus)])
    if needs_draft_model({"method": method}) and drafted is not None and "devices" not in filled["draft"]:
        choose([_choose_draft_devices(filled)])
    return choices


def has_own_heads(target: Path) -> bool:
    """Whether a model's own files hold heads that draft (method mtp)."""
    return fits_heads(target, {"speculation": {"method": "mtp"}})


def fits_heads(target: Path, drafting: Mapping[str, Any]) -> bool:
    """Whether heads can be read for a target, by the shapes of their tensors.

    Args:
        target: a model's directory.
        drafting: sections of a YAML file that name the heads.
    """
    try:
        return spec_of(target, drafting).heads is not None
    except TrtrunError:
        return False


def spec_of(target: Path, drafting: Mapping[str, Any]) -> JobSpec:
    """A job of one CPU slot with sections of a YAML file beside its target.

    Raises:
        ConfigError: they are wrong.
    """
    return JobSpec(make_config({"target": {"model": str(target), "devices": ["cpu:0"]}, **drafting}, Path.cwd()))


def bytes_of_weights(directory: Path) -> int:
    """Bytes of a model's weights, as its files are."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def count_granted() -> int:
    """GPUs of each node of the Slurm job, where Slurm tells, else of this host."""
    granted = find_allocation().gpus if in_allocation() else None
    return count_gpus() if granted is None else granted


def _takes_draft(method: str) -> bool:
    return METHODS[method].needs_draft_model or METHODS[method].needs_heads


def _choose_method(values: Mapping[str, Any], target: Path) -> list[Choice]:
    """Who drafts, and a shipped draft for the shipped target."""
    drafted = (values.get("draft") or {}).get("model")
    if drafted is not None:
        method = find_heads(find_model(Path(str(drafted)), Path.cwd(), "--draft"))
        if method is None:
            return [Choice("speculation.method", "draft_target", "the draft is a model")]
        return [Choice("speculation.method", method, "the draft's directory has heads of this kind")]
    model = str(values["target"]["model"])
    if model == f"{ASSET_PREFIX}target":
        return [
            Choice("draft.model", f"{ASSET_PREFIX}draft", "ships with this target"),
            Choice("speculation.method", "draft_target", "a small model drafts"),
        ]
    if has_own_heads(target):
        return [Choice("speculation.method", "mtp", "the target's own files hold heads that draft")]
    return [Choice("speculation.method", "ngram", "no draft is named: drafts are looked up in the text itself")]


def _choose_devices(values: Mapping[str, Any], target: Path, gpus: int) -> Choice:
    """The target's devices: GPUs of this host, as many as it can be split over; without GPUs one CPU slot."""
    if not gpus:
        return Choice("target.devices", ["cpu:0"], "no GPU is here: one process computes, with all cores")
    size = bytes_of_weights(target)
    most = max(1, min(gpus, size // LEAST_SHARE))
    for count in range(most, 0, -1):
        error = _find_error(values, list(range(count)), None)
        if error is None:
            seen = "the only GPU" if gpus == 1 else f"{'all' if count == gpus else f'{count} of'} {gpus} GPUs"
            why = "" if count == gpus else ": it cannot be split over more"
            if count == most < gpus:
                why = f": {size / 1e9:.3g} GB of weights on more would gain nothing"
            return Choice("target.devices", list(range(count)), f"{seen}{why}")
    assert error is not None
    raise error


def _choose_draft_devices(values: Mapping[str, Any]) -> Choice:
    """The target's devices for the draft as well, or as many of them as it can be split over."""
    devices = values["target"]["devices"]
    try:
        names = list(parse_devices(devices))
    except ValueError:  # counts, which an allocation fills, or what the configuration refuses
        return Choice("draft.devices", devices, "the target's")
    possible = (count for count in range(len(names), 0, -1) if _find_error(values, names, names[:count]) is None)
    count = next(possible, len(names))  # where none is, something else is wrong, which the start says
    if len(names) == 1:
        reason = "the target's: both in one process"
    elif count == len(names):
        reason = "the target's, which was the fastest placement of several"
    elif count == 1:
        reason = "the target's first: it cannot be split"
    else:
        reason = "of the target's as many as it can be split over"
    chosen = devices[:count] if isinstance(devices, list) else names[:count]
    return Choice("draft.devices", chosen, reason)


def _find_error(
    values: Mapping[str, Any], devices: Sequence[object], draft: Sequence[object] | None
) -> TrtrunError | None:
    """What speaks against models on these devices; the target alone where the draft has none."""
    placed = {**values, "target": {**values["target"], "devices": list(devices)}}
    if draft is None:
        kept = {key: value for key, value in placed.items() if key not in ("draft", "draft_adapters", "speculation")}
        placed = {**kept, "speculation": {"method": NO_DRAFTS}}
    else:
        placed["draft"] = {**values["draft"], "devices": list(draft)}
    try:
        check_models(JobSpec(make_config(placed, Path.cwd(), str(COMMAND_LINE))))
    except TrtrunError as error:
        return error
    return None
