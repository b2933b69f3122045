"""The sampling that a checkpoint asks for where a request is silent: generation_config.json, as vLLM reads it.

Of its keys these have an effect: temperature, top_p, top_k, min_p, repetition_penalty, and max_new_tokens, which is
max_tokens here. `do_sample` alone decides nothing, but for a temperature that is left out. Which tokens end a text
`config` reads. Source: vLLM's `ModelConfig.get_diff_sampling_param`. It does not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.configuration.config import RuntimeConfig
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import CheckpointError, InvalidRequestError
from trtrun.weights.checkpoint import read_json

GENERATION_CONFIG = "generation_config.json"

_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(path: Path) -> dict[str, Any]:
    """Sampling parameters by their names, those that a model's directory says; none where it has no such file.

    Raises:
        CheckpointError: one is out of its range.
    """
    values = read_json(path, GENERATION_CONFIG, required=False)
    found = {name: values[name] for name in _SAME if values.get(name) is not None}
    if type(found.get("top_k")) is int:
        found["top_k"] = max(0, found["top_k"])  # below 0 all are kept, too
    if values.get("do_sample") is True:
        found.setdefault("temperature", 1.0)  # transformers'
    if values.get("max_new_tokens") is not None:
        found["max_tokens"] = values["max_new_tokens"]
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{path / GENERATION_CONFIG}: {error}; server.generation_config: none leaves out what it says of sampling"
        ) from None
    return found


def sampling_defaults(config: RuntimeConfig) -> dict[str, Any]:
    """Those of a job's target, unless the configuration leaves them out (`server.generation_config`).

    Raises:
        CheckpointError: as of `read_generation_defaults`.
    """
    return {} if config.server.generation_config == "none" else read_generation_defaults(config.target.model)


def describe_generation_defaults(defaults: Mapping[str, Any]) -> str:
    """One line for users; empty where there are none."""
    if not defaults:
        return ""
    said = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"sampling where a request does not say it, by the model's {GENERATION_CONFIG}: {said}; "
        "server.generation_config: none leaves it out"
    )
