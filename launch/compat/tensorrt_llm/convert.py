"""The command line of TensorRT-LLM's convert_checkpoint.py for Llama and its kin, answered by `trtrun convert`.

Behind scripts/convert_checkpoint.py. It knows that command line, and nothing of how a checkpoint is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from launch.cli import guarded, leave
from launch.commands.write_models import ConvertOptions, make_folders_above, run_conversion
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser, naming_options

QUANTIZING = (
    "use_weight_only",
    "use_fp8",
    "use_fp8_rowwise",
    "int8_kv_cache",
    "fp8_kv_cache",
    "per_channel",
    "per_token",
    "per_group",
    "weight_only_precision",
)
"""Options that the original quantizes by, with scales that it does not search for."""

IDLE = (
    *("workers", "load_by_shard", "load_model_on_cpu", "log_level"),
    *("use_parallel_embedding", "embedding_sharding_dim", "use_embedding_sharing"),
)
"""Options that there is nothing to do for: however an embedding lies in the files, ranks read their share of it."""


OPTIONS = {"--model": "--model_dir", "--output": "--output_dir", "--tp-size": "--tp_size"}
"""By the names that trtrun's own command has for them."""


def parse_arguments(words: Sequence[str]) -> ConvertOptions:
    """What the command line of convert_checkpoint.py asks for.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
        ConfigError: a value is outside its range.
    """
    parser = LenientParser(prog="convert_checkpoint.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_dir", required=True, help="A Hugging Face directory.")
    parser.add_argument("--output_dir", default="tllm_checkpoint", help="Of the TensorRT-LLM checkpoint.")
    parser.add_argument("--dtype", default="float16", help="float32, bfloat16, float16, or auto: the model's.")
    parser.add_argument("--tp_size", type=int, default=1, help="Ranks that it is cut for.")
    parser.add_argument("--pp_size", type=int, default=1, help="Only 1.")
    parser.add_argument("--cp_size", type=int, default=1, help="Only 1.")
    parser.add_argument("--smoothquant", "-sq", type=float, help="Not supported: see scripts/quantize.py.")
    for name in QUANTIZING:
        parser.add_argument(f"--{name}", nargs="?", const="", help="Not supported: see scripts/quantize.py.")
    for name in IDLE:
        parser.add_argument(f"--{name}", nargs="?", help="Taken, and not needed.")
    parser.add_argument("--force", action="store_true", help="Write over a checkpoint that is there.")
    arguments = parser.parse_mended(words)
    _check(arguments)
    return ConvertOptions(
        Path(arguments.model_dir),
        Path(arguments.output_dir),
        "trtllm",
        arguments.tp_size,
        None if arguments.dtype == "auto" else arguments.dtype,
        arguments.force,
    )


def _check(arguments: argparse.Namespace) -> None:
    for name in ("pp_size", "cp_size"):
        if getattr(arguments, name) != 1:
            raise click.UsageError(f"--{name} {getattr(arguments, name)}: only tensor parallelism is supported")
    wanted = [name for name in QUANTIZING if getattr(arguments, name) is not None]
    wanted += ["smoothquant"] if arguments.smoothquant is not None else []
    if wanted:
        raise click.UsageError(
            f"--{wanted[0]}: this command does not quantize; scripts/quantize.py does (--qformat fp8, int4_awq)"
        )


def run(words: Sequence[str]) -> int:
    """Convert what the command line asks for; returns the exit status."""
    with naming_options(OPTIONS):
        options = parse_arguments(words)
        make_folders_above(options.output)
        return run_conversion(options)


def main() -> None:
    """Entry of scripts/convert_checkpoint.py."""
    leave(guarded(lambda: run(sys.argv[1:])))
