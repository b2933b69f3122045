"""The options by which examples/run.py and the scripts beside it name a target, a draft and a method.

What they are in trtrun's configuration: CPU slots take the place of GPUs where there are none. It knows no script's own
options, and nothing of how a job runs.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launch.compat.tensorrt_llm.quoting_fixes import CLOSING_QUOTES, OPENING_QUOTES
from launch.jobs.mpi.job import Job
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.engine_defaults import find_engines
from trtrun.configuration.engine_directory import EngineDescription
from trtrun.configuration.model_paths import find_model
from trtrun.errors import shorten
from trtrun.heads.eagle_tensors import find_eagle_method

DRAFT_OPTION = "--draft_target_model_config"
MEDUSA_OPTION = "--medusa_choices"
EAGLE_OPTION = "--eagle_choices"
DYNAMIC_OPTION = "--eagle_use_dynamic_tree"
TOP_K_OPTION = "--eagle_dynamic_tree_max_top_k"
LOOKAHEAD_OPTION = "--lookahead_config"

_AROUND = OPENING_QUOTES + CLOSING_QUOTES + " "
"""What web pages leave around a value."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add all but --engine_dir, which not every script needs."""
    parser.add_argument("--draft_engine_dir", help="The draft's engine, or model directory.")
    parser.add_argument("--tokenizer_dir", help="Where the tokenizer is, if not beside the target.")
    parser.add_argument(
        DRAFT_OPTION,
        metavar='"[4,[0],[1],False]"',
        help="draft_len, the draft's devices, the target's devices, use_logits.",
    )
    parser.add_argument(
        MEDUSA_OPTION,
        metavar='"[[0],[0,0],[1]]"',
        help="Paths of a tree, or its name: Medusa heads draft, of --draft_engine_dir or beside the target's weights.",
    )
    parser.add_argument(
        EAGLE_OPTION,
        metavar='"[[0],[0,0],[1]]"',
        help="Paths of a tree, or its name: an EAGLE head drafts, of --draft_engine_dir.",
    )
    parser.add_argument(
        DYNAMIC_OPTION, action="store_true", help=f"An EAGLE head drafts dynamic trees; with {TOP_K_OPTION}."
    )
    parser.add_argument(TOP_K_OPTION, type=int, help="Tokens of each depth that are continued.")
    parser.add_argument(
        LOOKAHEAD_OPTION,
        metavar='"[7,7,7]"',
        help="Window size, n-gram size and verification set size: the target drafts for itself.",
    )
    parser.add_argument("--kv_cache_enable_block_reuse", action="store_true")
    parser.add_argument("--kv_cache_free_gpu_memory_fraction", type=float, help="Of memory that is free.")
    parser.add_argument("--num_beams", type=int, default=1, help="Only 1: beam search is not supported.")
    parser.add_argument("--use_py_session", action="store_true", help="Not supported.")


def check_engine_options(arguments: argparse.Namespace) -> None:
    """Refuse what does not go together, or is not supported.

    Raises:
        click.UsageError: always of one option or two.
    """
    if arguments.num_beams > 1:
        raise click.UsageError(f"--num_beams {arguments.num_beams}: beam search is not supported with a draft model")
    if arguments.use_py_session:
        raise click.UsageError("--use_py_session: there is no Python session; leave the option out")
    chosen = {
        DRAFT_OPTION: arguments.draft_target_model_config is not None,
        MEDUSA_OPTION: arguments.medusa_choices is not None,
        EAGLE_OPTION: arguments.eagle_choices is not None,
        DYNAMIC_OPTION: arguments.eagle_use_dynamic_tree,
        LOOKAHEAD_OPTION: arguments.lookahead_config is not None,
    }
    given = [option for option, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]} are two methods: give one of them")
    if arguments.eagle_use_dynamic_tree != (arguments.eagle_dynamic_tree_max_top_k is not None):
        raise click.UsageError(f"{DYNAMIC_OPTION} and {TOP_K_OPTION} go together: give both, or none")
    if chosen[EAGLE_OPTION] or chosen[DYNAMIC_OPTION]:
        if arguments.draft_engine_dir is None:
            raise click.UsageError(f"{given[0]} needs --draft_engine_dir: the directory of the EAGLE head")
        return
    if arguments.medusa_choices is not None:
        return
    if arguments.lookahead_config is not None and arguments.draft_engine_dir is not None:
        raise click.UsageError(f"{LOOKAHEAD_OPTION} drafts without a draft model: leave --draft_engine_dir out")
    if (arguments.draft_engine_dir is None) != (arguments.draft_target_model_config is None):
        raise click.UsageError(
            f"--draft_engine_dir and {DRAFT_OPTION} go together: give both, or none for plain decoding; a directory of "
            f"heads goes with {MEDUSA_OPTION}, {EAGLE_OPTION} or {DYNAMIC_OPTION}"
        )


def parse_draft_config(text: str) -> tuple[int, list[int], list[int], bool]:
    """Read `[draft_len, [draft devices], [target devices], use_logits]`, as literals only.

    Raises:
        click.UsageError: it is something else.
    """
    match _read_list(text):
        case [draft_len, [*draft_devices], [*target_devices], bool(use_logits)] if (
            type(draft_len) is int
            and draft_devices
            and target_devices
            and all(type(device) is int and device >= 0 for device in (*draft_devices, *target_devices))
        ):
            return draft_len, draft_devices, target_devices, use_logits
    raise click.UsageError(
        f'{DRAFT_OPTION} {text!r}: write "[draft_len,[draft devices],[target devices],use_logits]", '
        'such as "[4,[0],[1],False]"'
    )


def parse_choices(text: str, option: str) -> object:
    """Read a list of paths, as literals only, or the name of a tree; what is in it the configuration checks.

    Raises:
        click.UsageError: it is something else.
    """
    name = text.strip(_AROUND)
    value = name if name.isidentifier() else _read_list(text)
    if value is None:
        expected = 'paths of ranks, such as "[[0],[0,0],[1]]", or the name of a tree'
        raise click.UsageError(f"{option} {shorten(name)}: write {expected}")
    return value


def parse_lookahead_config(text: str) -> object:
    """Read `[window size, n-gram size, verification set size]`, as literals only; what they are the configuration
    checks.

    Raises:
        click.UsageError: it is no list.
    """
    value = _read_list(text)
    if value is None:
        expected = 'window size, n-gram size and verification set size, such as "[7,7,7]"'
        raise click.UsageError(f"{LOOKAHEAD_OPTION} {shorten(text.strip(_AROUND))}: write {expected}")
    return value


def _read_list(text: str) -> Sequence[Any] | None:
    """A list or tuple of literals; None where the text is something else."""
    try:
        value = ast.literal_eval(text.strip(_AROUND))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, list | tuple) else None


def make_runtime_config(
    arguments: argparse.Namespace, has_gpu: bool, dtype: str = "auto", script: str = "run.py"
) -> RuntimeConfig:
    """The configuration that the options stand for.

    Args:
        arguments: of `add_engine_options`, and `engine_dir`. Which kind of EAGLE head drafts its files say, and how
            many devices a target has that no option counts its engine.
        has_gpu: whether device numbers are GPUs; else they are CPU slots.
        dtype: of the models, as in the YAML file.
        script: for messages.

    Raises:
        TrtrunError: an option's value is wrong, or a model is not there.
    """
    draft_len, draft_devices, use_logits = 4, [0], False
    models = {"target": {"model": arguments.engine_dir}, "draft": {"model": arguments.draft_engine_dir}}
    engines = find_engines(models, None, script)
    target_devices = list(range(engines["target"].tp_size if "target" in engines else 1))
    if arguments.draft_target_model_config is not None:
        draft_len, draft_devices, target_devices, use_logits = parse_draft_config(arguments.draft_target_model_config)
        draft_devices = _fit_devices(draft_devices, engines.get("draft"))
        target_devices = _fit_devices(target_devices, engines.get("target"))
    kind = "cuda" if has_gpu else "cpu"
    values: dict[str, Any] = {
        "target": {"model": arguments.engine_dir, "devices": [f"{kind}:{index}" for index in target_devices]},
        "speculation": {"draft_len": draft_len, "use_logits": use_logits},
        "kv_cache": {"enable_block_reuse": arguments.kv_cache_enable_block_reuse},
    }
    if arguments.medusa_choices is not None:
        choices = parse_choices(arguments.medusa_choices, MEDUSA_OPTION)
        values["speculation"] = {"method": "medusa", "medusa_choices": choices}
        values["draft"] = {"model": arguments.draft_engine_dir or arguments.engine_dir}
    elif arguments.eagle_choices is not None or arguments.eagle_use_dynamic_tree:
        if arguments.eagle_choices is not None:
            tree: dict[str, object] = {"eagle_choices": parse_choices(arguments.eagle_choices, EAGLE_OPTION)}
        else:
            tree = {"eagle_topk": arguments.eagle_dynamic_tree_max_top_k}
        method = find_eagle_method(find_model(Path(arguments.draft_engine_dir), None, "--draft_engine_dir"))
        values["speculation"] = {"method": method, **tree}
        values["draft"] = {"model": arguments.draft_engine_dir}
    elif arguments.lookahead_config is not None:
        sizes = parse_lookahead_config(arguments.lookahead_config)
        values["speculation"] = {"method": "lookahead", "lookahead_config": sizes}
    elif arguments.draft_engine_dir is not None:
        devices = [f"{kind}:{index}" for index in draft_devices]
        values["draft"] = {"model": arguments.draft_engine_dir, "devices": devices}
    else:
        values["speculation"]["method"] = "none"
    if dtype != "auto":
        values["target"]["dtype"] = dtype
        if "devices" in values.get("draft", {}):  # a model, and no heads, which are the target's kind
            values["draft"]["dtype"] = dtype
    if arguments.tokenizer_dir is not None:
        values["tokenizer"] = arguments.tokenizer_dir
    if arguments.kv_cache_free_gpu_memory_fraction is not None:
        values["kv_cache"]["free_memory_fraction"] = arguments.kv_cache_free_gpu_memory_fraction
    return make_config(values, where=script)


def _fit_devices(devices: list[int], engine: EngineDescription | None) -> list[int]:
    """The first of the devices, as many as the engine was built for: published command lines list all of a host's."""
    return devices if engine is None else devices[: engine.tp_size]


def has_gpu() -> bool:
    """Whether device numbers are GPUs; else they are CPU slots."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def say_slots(script: str, arguments: argparse.Namespace, job: Job) -> None:
    """Say where device numbers are CPU slots, and which are not used; of a job of many ranks its parent does."""
    place, config = find_mpi_rank(), job.config
    if place is not None and place.size == job.topology.world_size > 1:
        return
    if not has_gpu():
        print(f"{script}: no GPU here; each device number is a CPU slot", file=sys.stderr, flush=True)
    if arguments.draft_target_model_config is not None and config.draft is not None:
        _, *named, _ = parse_draft_config(arguments.draft_target_model_config)
        used = [config.draft.devices, config.target.devices]
        for role, listed, taken in zip(("draft", "target"), named, used, strict=True):
            if len(taken) < len(listed):
                line = f"the {role}'s engine was built for {len(taken)} of the {len(listed)} devices: the first"
                print(f"{script}: {line}", file=sys.stderr, flush=True)
