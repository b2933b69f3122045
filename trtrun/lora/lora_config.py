"""adapter_config.json of PEFT: which matrices an adapter changes, with which ranks and scales.

Whatever would make the adapter compute something else than W + scale * up @ down is refused by name, and so are keys
that nobody here knows, unless they say nothing. It knows names of modules. It does not know tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trtrun.errors import CheckpointError, shorten, wrap_errors
from trtrun.module_patterns import Matcher, Steps, TooManyStepsError, end_matcher, is_plain, whole_matcher
from trtrun.weights.checkpoint import read_json
from trtrun.weights.model_files import hash_files

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

MOST_RANK = 256

_LAYER = re.compile(r".*\.layers\.(\d+)\.")

_MOST_NAMES = 16384
_MOST_PATTERN_CHARACTERS = 8192
"""Size of a key that names modules: names, and characters of regular expressions in all, so that reading them takes no
time. What matching takes is counted, over all keys (`Steps`)."""

_USED = (
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "bias", "fan_in_fan_out",
)  # fmt: skip
_HARMLESS = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "init_lora_weights",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "peft_version", "runtime_config",
    "ephemeral_gpu_offload", "qalora_group_size", "velora_config",
)  # fmt: skip
"""Keys that say how it was trained, or speak of files."""
_BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""How names of starts begin that take out of the base what they put into the adapter. PEFT does so again where it loads
such an adapter; of one that it has converted it writes true."""
_NOT_CONVERTED = "loftq"
"""The one of which PEFT makes no usual adapter."""
_MOST_SAID = 60
"""Characters of a key."""


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter_config.json says.

    Attributes:
        path: of the directory.
        rank, alpha: of modules without their own.
        rank_pattern, alpha_pattern: of modules whose names match, the first that does; None where none does.
        is_rank_stabilized: whether the scale is alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732), not alpha / rank.
        is_target: whether a module, by its name in the base model, is changed.
    """

    path: Path
    rank: int
    alpha: float
    rank_pattern: Callable[[str], int | None]
    alpha_pattern: Callable[[str], float | None]
    is_rank_stabilized: bool
    is_target: Callable[[str], bool]

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        found = self.rank_pattern(module)
        return self.rank if found is None else found

    def scale_of(self, module: str) -> float:
        """What up @ down of a module is multiplied by."""
        rank, found = self.rank_of(module), self.alpha_pattern(module)
        alpha = self.alpha if found is None else found
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank


def read_lora_config(path: Path) -> LoraConfig:
    """Read the adapter_config.json of a directory.

    Raises:
        CheckpointError: it is not there, or says something that is not supported; one line names the key.
    """
    file = path / CONFIG_FILE
    with wrap_errors(file, CheckpointError):
        if path.is_dir() and not file.is_file():
            raise CheckpointError(f"{path} has no {CONFIG_FILE}: give a directory that PEFT saved an adapter to")
        values = read_json(path, CONFIG_FILE, required=True)
        _check_kind(file, values)
        rank, alpha, steps = values.get("r", 8), values.get("lora_alpha", 8), Steps()
        return LoraConfig(
            path,
            _read_rank(file, "r", rank),
            _read_alpha(file, "lora_alpha", alpha),
            _read_patterns(file, values, "rank_pattern", _read_rank, steps),
            _read_patterns(file, values, "alpha_pattern", _read_alpha, steps),
            bool(values.get("use_rslora")),  # which is true, false or null
            _read_targets(file, values, steps),
        )


def hash_adapter_files(path: Path) -> str:
    """Tells the files of an adapter from others."""
    return hash_files(path, (CONFIG_FILE,), (WEIGHTS_FILE,))


def _check_kind(file: Path, values: Mapping[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {shorten(kind)}; LORA is supported")
    if values.get("task_type") not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{file}: task_type is {shorten(values['task_type'])}; CAUSAL_LM is supported")
    if values.get("bias", "none") != "none":
        raise CheckpointError(
            f"{file}: bias is {shorten(values['bias'])}; adapters without biases (none) are supported"
        )
    if values.get("use_rslora") not in (None, True, False):
        raise CheckpointError(f"{file}: use_rslora must be true or false, not {shorten(values['use_rslora'])}")
    if values.get("fan_in_fan_out"):
        raise CheckpointError(f"{file}: fan_in_fan_out is true, which the linear layers of these models are not")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        remedy = "save it with path_initial_model_for_weight_conversion, which makes a usual one of it"
        if start.lower().startswith(_NOT_CONVERTED):
            remedy = "train without it"
        raise CheckpointError(
            f"{file}: init_lora_weights is {shorten(start, 60)}, which changes the base model, too: {remedy}"
        )
    for key, value in values.items():
        if key not in _USED and key not in _HARMLESS and value not in (None, False, "", [], {}):
            named = key if key.isprintable() else shorten(key)
            raise CheckpointError(
                f"{file}: {named[:_MOST_SAID]} is {shorten(value, 60)}, which is not supported: train without it"
            )


def _read_patterns(
    file: Path, values: Mapping[str, Any], key: str, read: Callable[[Path, str, object], T], steps: Steps
) -> Callable[[str], T | None]:
    """The value of the first pattern that matches the end of a module's name, or from "^" on its begin, as in PEFT."""
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {key} must be an object, not {shorten(found)}")
    _check_size(file, key, list(found))
    pairs = [
        (_compile(file, key, pattern, end_matcher, steps), read(file, key, value)) for pattern, value in found.items()
    ]
    return cache(lambda module: next((value for matches, value in pairs if matches(module)), None))


def _check_size(file: Path, key: str, patterns: Sequence[str]) -> None:
    if len(patterns) > _MOST_NAMES:
        raise CheckpointError(f"{file}: {key} names {len(patterns)} modules; more than {_MOST_NAMES} are not supported")
    length = sum(len(pattern) for pattern in patterns if not is_plain(pattern))
    if length > _MOST_PATTERN_CHARACTERS:
        raise CheckpointError(
            f"{file}: {key} has regular expressions of {length} characters, more than {_MOST_PATTERN_CHARACTERS}: give "
            "names of modules"
        )


def _read_rank(file: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANK:
        raise CheckpointError(f"{file}: {key} must be a rank between 1 and {MOST_RANK}, not {shorten(value)}")
    return value


def _read_alpha(file: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{file}: {key} must be a finite number, not {shorten(value)}")
    return float(value)


def _compile(
    file: Path, key: str, pattern: str, make: Callable[[str, Steps], Matcher], steps: Steps
) -> Callable[[str], bool]:
    """Its matcher, which may raise a CheckpointError, too: what all patterns of a file take is bounded."""

    def refused(error: ValueError) -> CheckpointError:
        return CheckpointError(f"{file}: {key}: {shorten(pattern)} is no regular expression that can be used: {error}")

    try:
        matches = make(pattern, steps)
    except ValueError as error:
        raise refused(error) from None

    def checked(module: str) -> bool:
        try:
            return matches(module)
        except TooManyStepsError as error:
            raise refused(error) from None

    return checked


def _read_targets(file: Path, values: Mapping[str, Any], steps: Steps) -> Callable[[str], bool]:
    """Read which modules are changed: by the ends of their names, by a regular expression, or all."""
    targets, excluded = values.get("target_modules"), values.get("exclude_modules")
    if not targets:
        raise CheckpointError(f"{file}: target_modules is missing: name the modules that the adapter changes")
    names = _read_names(file, "target_modules", targets, steps)
    not_names = _read_names(file, "exclude_modules", excluded, steps) if excluded else None
    if values.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
        raise CheckpointError(f"{file}: layers_pattern is {shorten(values['layers_pattern'])}; leave it out")
    layers = values.get("layers_to_transform")
    listed = layers if isinstance(layers, list) else [layers]
    if layers is not None and not all(type(number) is int for number in listed):
        raise CheckpointError(
            f"{file}: layers_to_transform must be a number of a layer or a list of them, not {shorten(layers)}"
        )
    kept = None if layers is None else set(listed)

    def is_target(module: str) -> bool:
        if not names(module) or (not_names is not None and not_names(module)):
            return False
        number = _LAYER.match(module)
        return kept is None or (number is not None and int(number[1]) in kept)

    return cache(is_target)


def _read_names(file: Path, key: str, value: object, steps: Steps) -> Callable[[str], bool]:
    if isinstance(value, str):
        if value == "all-linear" and key == "target_modules":
            return lambda module: True
        _check_size(file, key, [value])
        return _compile(file, key, value, whole_matcher, steps)
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise CheckpointError(f"{file}: {key} must be a list of names or a regular expression, not {shorten(value)}")
    if len(value) > _MOST_NAMES:
        raise CheckpointError(f"{file}: {key} names {len(value)} modules; more than {_MOST_NAMES} are not supported")
    ends = tuple(f".{name}" for name in value)
    return lambda module: f".{module}".endswith(ends)
