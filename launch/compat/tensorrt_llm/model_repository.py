"""The command line of tensorrtllm_backend's launch_triton_server.py, answered by `trtrun serve`.

Behind scripts/launch_triton_server.py. A model repository names engines, devices and limits in its config.pbtxt files,
as fill_template.py fills them: they become a YAML file beside them. It knows these files, and nothing of how a server
runs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from launch.cli import guarded, leave
from launch.compat.tensorrt_llm.engine_options import has_gpu
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser
from trtrun.configuration.config import make_config
from trtrun.configuration.engine_defaults import find_engines
from trtrun.errors import ConfigError, shorten_path, why_unreadable

TARGET, DRAFT, TOKENIZER = "tensorrt_llm", "tensorrt_llm_draft", "preprocessing"
ENGINE = "gpt_model_path"
PORTS = ("http_port", "grpc_port", "metrics_port")
IDLE = ("world_size", "tritonserver", "tensorrt_llm_model_name", "multimodal_gpu0_cuda_mem_pool_bytes")
IDLE_FLAGS = ("multi-model", "disable-spawn-processes", "oversubscribe", "force")
PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*{\s*string_value:\s*"([^"$]*)"')
"""A parameter of config.pbtxt whose value is filled in."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of launch_triton_server.py.

    Raises:
        click.UsageError: an option is unknown, or lacks its value.
    """
    parser = LenientParser(prog="launch_triton_server.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_repo", "--model-repository", dest="model_repo", required=True, help="With its models.")
    for name in PORTS:
        parser.add_argument(f"--{name}", type=int, help="As in the YAML file.")
    parser.add_argument("--log", action="store_true", help="Write what the server says to --log-file.")
    parser.add_argument("--log-file", default="triton_log.txt", help="Where --log writes.")
    for name in IDLE:
        parser.add_argument(f"--{name}", help="Taken, and not needed.")
    for name in IDLE_FLAGS:
        parser.add_argument(f"--{name}", action="store_true", help="Taken, and not needed.")
    return parser.parse_mended(words)


def read_parameters(repository: Path, model: str) -> dict[str, str] | None:
    """Parameters of a model's config.pbtxt that are filled in, and `max_batch_size`; None where there is no such model.

    Raises:
        ConfigError: it cannot be read.
    """
    path = repository / model / "config.pbtxt"
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shorten_path(path)} cannot be read: {why_unreadable(error)}") from None
    found = {name: value for name, value in PARAMETER.findall(text) if value}
    rows = re.search(r"^max_batch_size:\s*(\d+)", text, re.MULTILINE)
    return found | ({"max_batch_size": rows[1]} if rows is not None else {})


def make_values(repository: Path, is_on_gpus: bool) -> dict[str, Any]:
    """What a YAML file has to say for a model repository; device numbers are CPU slots where there is no GPU.

    Raises:
        ConfigError: the model tensorrt_llm is not there, names no engine, drafts otherwise, or has a
            value that is none.
    """
    target, draft = read_parameters(repository, TARGET), read_parameters(repository, DRAFT)
    if target is None:
        raise ConfigError(f"--model_repo {shorten_path(repository)}: there is no {TARGET}/config.pbtxt")
    if "decoding_mode" in target:
        mode = target["decoding_mode"]
        raise ConfigError(f"decoding_mode '{mode}': start trtrun serve with a YAML file that has speculation.method")
    kind = "cuda" if is_on_gpus else "cpu"
    name = repository.resolve().name
    values: dict[str, Any] = {"speculation": {"method": "none"}, "server": {"model_name": name}}
    for role, model, parameters in (("target", TARGET, target), ("draft", DRAFT, draft)):
        if parameters is None:
            continue
        if ENGINE not in parameters:
            where = shorten_path(repository / model / "config.pbtxt")
            raise ConfigError(f"{where}: {ENGINE} is not filled in: the engine_dir of fill_template.py")
        devices = [f"{kind}:{number.strip()}" for number in parameters.get("gpu_device_ids", "0").split(",")]
        values[role] = {"model": os.path.abspath(parameters[ENGINE]), "devices": devices}
    engines = find_engines({**values, "speculation": {}}, None, str(repository))
    if draft is not None:
        limits = engines["target"].limits if "target" in engines else None
        values["speculation"] = {"draft_len": limits.max_draft_len} if limits and limits.max_draft_len else {}
    if "max_batch_size" in target and not ("target" in engines and engines["target"].limits.max_batch_size):
        values["scheduler"] = {"max_batch_size": _read(int, target, "max_batch_size")}
    kv_cache: dict[str, Any] = {}
    if "max_tokens_in_paged_kv_cache" in target:
        kv_cache["max_tokens"] = _read(int, target, "max_tokens_in_paged_kv_cache")
    if "kv_cache_free_gpu_mem_fraction" in target:
        kv_cache["free_memory_fraction"] = _read(float, target, "kv_cache_free_gpu_mem_fraction")
    if "enable_kv_cache_reuse" in target:
        kv_cache["enable_block_reuse"] = target["enable_kv_cache_reuse"].lower() == "true"
    tokenizer = (read_parameters(repository, TOKENIZER) or {}).get("tokenizer_dir")
    return values | {"kv_cache": kv_cache} | ({"tokenizer": os.path.abspath(tokenizer)} if tokenizer else {})


def _read(kind: type, parameters: Mapping[str, str], name: str) -> Any:
    try:
        return kind(parameters[name])
    except ValueError:
        raise ConfigError(f"{TARGET}/config.pbtxt: {name}: '{parameters[name]}' is not a number") from None


def run(words: Sequence[str]) -> int:
    """Write the YAML file, and become `trtrun serve`; comes back only with what is wrong."""
    arguments = parse_arguments(words)
    repository = Path(arguments.model_repo)
    values = make_values(repository, has_gpu())
    file = repository / "serve.yaml"
    make_config(values, where=str(file))
    try:
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{file} cannot be written: {error.strerror}") from None
    print(f"launch_triton_server.py: trtrun serve --config {file}", file=sys.stderr, flush=True)
    if arguments.log:
        with open(arguments.log_file, "wb") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
    ports = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in PORTS}
    given = [word for option, port in ports.items() if port is not None for word in (option, str(port))]
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, "-m", "launch.cli", "serve", "--config", str(file), *given]
    os.execve(sys.executable, words, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def main() -> None:
    """Entry of scripts/launch_triton_server.py."""
    leave(guarded(lambda: run(sys.argv[1:])))
