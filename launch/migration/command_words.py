"""A command line of `vllm serve` or trtllm-serve in the words of `trtrun serve`, with a hint at each.

It knows which words belong together, and nothing of what the options mean: that is serving_flags.py. A
configuration of TensorRT-LLM's (--extra_llm_api_options) is read by it as well, as its fields have the options' names.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from launch.migration.flags import Flag, Takes
from launch.migration.serving_flags import BY_NAME, normal_name
from launch.migration.speculative_configs import Changes, read_tensorrt_llm
from trtrun.errors import nearest

API_OPTIONS = "--extra-llm-api-options"
ONE_FIELD = "--speculative-config."
"""How vLLM takes one field of it."""
OWN_OPTIONS = {
    **{"target.devices": "--devices", "draft.model": "--draft", "draft.devices": "--draft-devices"},
    **{"speculation.method": "--method", "speculation.draft_len": "--draft-len"},
    **{"scheduler.max_batch_size": "--max-batch-size"},
    **{"scheduler.max_seq_len": "--max-seq-len", "server.http_port": "--http-port"},
    **{"server.grpc_port": "--grpc-port", "server.metrics_port": "--metrics-port"},
    **{"server.tls_key": "--tls-key", "server.tls_cert": "--tls-cert"},
}
"""Options of `trtrun serve` by their keys."""

_IDLE_FIELDS = (
    *("cuda_graph_config", "disable_overlap_scheduler", "moe_config", "print_iter_log", "enable_iter_perf_stats"),
    *("sampler_type", "stream_interval", "torch_compile_config", "scheduler_config", "batch_wait_timeout_ms"),
    *("batch_wait_timeout_iters", "enable_autotuner", "garbage_collection_gen0_threshold", "perf_metrics_max_requests"),
    *("return_perf_metrics", "enable_layerwise_nvtx_marker", "allreduce_strategy", "extended_runtime_perf_knob_config"),
    *("pytorch_backend_config", "mm_encoder_only", "env_overrides"),
)
_KV_FIELDS = {
    "free_gpu_memory_fraction": "kv_cache.free_memory_fraction",
    "enable_block_reuse": "kv_cache.enable_block_reuse",
    "max_tokens": "kv_cache.max_tokens",
    "tokens_per_block": "kv_cache.block_size",
}
_IDLE_KV_FIELDS = (
    *("host_cache_size", "event_buffer_max_size", "enable_partial_reuse", "copy_on_partial_reuse", "use_uvm"),
    *("sink_token_length", "max_attention_window", "onboard_blocks", "secondary_offload_min_priority"),
    *("max_gpu_total_bytes", "attention_dp_events_gather_period_ms", "cross_kv_cache_fraction"),
    *("mamba_ssm_cache_dtype", "use_kv_cache_manager_v2"),
)


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
        self._keep(name, flag.change(name, given), "so in any case" if flag.refuses else flag.says)

    def add_api_options(self, path: Path) -> None:
        """Read a YAML file of TensorRT-LLM's LLM API.

        Raises:
            click.UsageError: it cannot be read, or a field is refused or not known.
        """
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise click.UsageError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
        if not isinstance(fields, dict):
            raise click.UsageError(f"{path}: write fields, such as max_batch_size: 8")
        for name, value in fields.items():
            self._add_field(str(name), value)

    def _add_field(self, name: str, value: Any) -> None:
        if name == "speculative_config":
            if value is not None:
                self._keep(name, read_tensorrt_llm(value))
        elif name == "kv_cache_config":
            self._keep(name, _read_kv_fields(value))
        elif name in ("cuda_graph_config", "use_cuda_graph") and not value:
            self._keep(name, {"cuda_graphs": False})
        elif name in _IDLE_FIELDS or name == "use_cuda_graph":
            self._keep(name, {}, "the runtime decides it")
        elif normal_name(f"--{name}") in BY_NAME:
            if value is not None:
                self.add(name, BY_NAME[normal_name(f"--{name}")], value)
        else:
            known = [*_IDLE_FIELDS, *(option[2:].replace("-", "_") for option in BY_NAME if option.startswith("--"))]
            raise click.UsageError(f"unknown field {name!r}{nearest(name, known)}")

    def _keep(self, name: str, changes: Changes, says: str = "") -> None:
        self.changes |= changes
        if changes:
            self.told.append(f"{name} is {shlex.join(self.show(changes))}" + f" ({says})" * bool(says))
        else:
            self.idle.append(f"{name} (nothing to do{': ' * bool(says)}{says})")

    @property
    def hint(self) -> str | None:
        """One line on all of them; None where there were none."""
        parts = [*self.told, *self.idle]
        return f"here {'; '.join(parts)}" if parts else None


def read_words(words: Sequence[str], own: Collection[str]) -> tuple[list[str], Reading]:
    """The words of `trtrun serve` for a command line that may have options of others.

    Args:
        words: behind `serve`.
        own: options of `trtrun serve`, which stay as they are.

    Raises:
        click.UsageError: an option is refused, lacks its value, or its value cannot be read.
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
            kept.append(value if equals else _take(name, rest))
        elif normal.startswith(ONE_FIELD):
            field_name = normal.removeprefix(ONE_FIELD).replace("-", "_")
            speculative[field_name] = yaml.safe_load(value if equals else _take(name, rest))
        elif normal == API_OPTIONS:
            reading.add_api_options(Path(value if equals else _take(name, rest)))
        elif (found := _find(normal)) is None or (name in own and not listed):
            kept.append(word)
        else:
            flag, is_on = found
            if flag.takes is Takes.NONE:
                reading.add(name, flag, is_on)
            elif flag.takes is Takes.ONE:
                reading.add(name, flag, value if equals else _take(name, rest))
            else:
                given = [value] if equals else [_take(name, rest)]
                while rest and not rest[0].startswith("-"):
                    given.append(rest.pop(0))
                reading.add(name, flag, given)
    if speculative:
        reading.add(ONE_FIELD[:-1], BY_NAME[ONE_FIELD[:-1]], speculative)
    return [*own_words(reading.changes), *kept], reading


def own_words(changes: Mapping[str, object]) -> list[str]:
    """Options of `trtrun serve` for values of keys."""
    words: list[str] = []
    for key, value in changes.items():
        if key not in OWN_OPTIONS:
            is_plain = isinstance(value, str) and yaml.safe_load(value) == value
            words += ["--set", f"{key}={value if is_plain else json.dumps(value)}"]
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


def _take(name: str, rest: list[str]) -> str:
    if not rest:
        raise click.UsageError(f"{name} needs a value")
    return rest.pop(0)


def _read_kv_fields(given: Any) -> Changes:
    if not isinstance(given, dict):
        raise click.UsageError("kv_cache_config: write fields, such as free_gpu_memory_fraction: 0.9")
    changes: Changes = {}
    for name, value in given.items():
        if name == "dtype":
            changes |= BY_NAME["--kv-cache-dtype"].change(f"kv_cache_config: {name}", value)
        elif name in _KV_FIELDS:
            changes |= {_KV_FIELDS[name]: value} if value is not None else {}
        elif name not in _IDLE_KV_FIELDS:
            known = ["dtype", *_KV_FIELDS, *_IDLE_KV_FIELDS]
            raise click.UsageError(f"kv_cache_config: unknown field {name!r}{nearest(str(name), known)}")
    return changes
