"""`trtrun quantize`: parse its command line and play the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from launch.exit_codes import ExitCode, describe_exit_codes
from launch.jobs.mpi.drain import Drain, EndedAtStart
from launch.quantize.options import QuantizeOptions, parse_device_names
from trtrun.tools.quantizing.settings import DTYPES, FORMATS, KV_CACHES, LAYOUTS, QuantizingSettings

_DEFAULTS = QuantizingSettings("fp8")


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@click.option("--model", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The plain checkpoint.")
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Of the quantized one.")
@click.option("--format", "format_", required=True, metavar="|".join(FORMATS), help="What weights become.")
@click.option("--kv-cache", metavar="|".join(KV_CACHES), help="Write scales for keys and values, too.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Texts: rows {"text": "…"} or of token ids, or a file of plain text.',
)
@click.option("--samples", type=int, default=_DEFAULTS.samples, show_default=True, help="Texts of it, at most.")
@click.option(
    "--max-length", type=int, default=_DEFAULTS.max_length, show_default=True, help="Tokens of a text, at most."
)
@click.option(
    "--held-out",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Texts to measure on.  [default: the last eighth of --calibration]",
)
@click.option(
    "--held-out-samples",
    type=int,
    default=_DEFAULTS.held_out_samples,
    show_default=True,
    help="Texts to measure on, at most; 0 measures nothing.",
)
@click.option(
    "--group-size",
    type=int,
    default=_DEFAULTS.group_size,
    show_default=True,
    help="Input features with one scale (int4_awq); fewer where a dimension is no multiple of it.",
)
@click.option(
    "--smoothing",
    type=float,
    default=_DEFAULTS.smoothing,
    show_default=True,
    help="How much of the activations' outliers weights take over (int8_sq).",
)
@click.option(
    "--layout",
    default=_DEFAULTS.layout,
    show_default=True,
    metavar="|".join(LAYOUTS),
    help="Of the files; modelopt and trtllm have fp8, static, and int4_awq without zero points.",
)
@click.option(
    "--tp-size",
    type=int,
    default=_DEFAULTS.tp_size,
    show_default=True,
    help="Ranks that are to share the model: without cutting a group (int4_awq), with a file each (trtllm).",
)
@click.option("--dtype", metavar="|".join(DTYPES), help="Of what stays plain.  [default: the checkpoint's]")
@click.option("--devices", help="GPUs that share the texts, such as 0,1.  [default: the first GPU, else the CPU]")
@click.option("--resume", is_flag=True, help="Go on, as without it; a checkpoint that is done already is no error.")
@click.option("--force", is_flag=True, help="Begin anew where a checkpoint or another run is.")
def quantize(format_: str, **values: Any) -> int:
    """Quantize a checkpoint, layer by layer, to one that trtrun and other runtimes read as it is.

    The same command goes on where a run was ended. The last line is JSON: perplexity before and after, bytes and
    seconds; the report of each layer lies beside the weights.
    """
    return run_quantization(make_options(format_, values))


def make_options(format_: str, values: dict[str, Any]) -> QuantizeOptions:
    """What the parameters of the command ask for.

    Raises:
        ConfigError: a setting is outside its range, or there is no such device.
    """
    names = (
        "kv_cache",
        "group_size",
        "samples",
        "max_length",
        "held_out_samples",
        "smoothing",
        "dtype",
        "tp_size",
        "layout",
    )
    settings = QuantizingSettings(format_, **{name: values[name] for name in names})
    files = {name: values[name] for name in ("model", "output", "calibration", "held_out", "resume", "force")}
    return QuantizeOptions(**files, devices=parse_device_names(values["devices"]), settings=settings)


def run_quantization(options: QuantizeOptions) -> int:
    """Check the options and do the run, once this process hears the signals that may end it."""
    drain = Drain()
    try:
        with drain.listening():
            from launch.quantize.checks import check_quantization

            options = check_quantization(options)
            from launch.quantize.run import play_quantization

            return play_quantization(options, drain)
    except EndedAtStart:
        line = f"ended by {drain.cause} before the first layer; the same command begins it"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)
        return ExitCode.DRAINED
