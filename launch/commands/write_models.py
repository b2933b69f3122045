"""The commands that write a model's directory: `trtrun quantize`, `trtrun build` and `trtrun convert`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from launch.exit_codes import ExitCode, FailedError, describe_exit_codes
from launch.jobs.mpi.drain import Drain, EndedAtStart
from launch.quantize.options import QuantizeOptions, parse_device_names
from trtrun import __version__
from trtrun.configuration.engine_directory import Limits
from trtrun.errors import ConfigError, nearest, shorten_path
from trtrun.tools.building.settings import DEVICES, BuildSettings
from trtrun.tools.building.settings import DTYPES as BUILT_DTYPES
from trtrun.tools.quantizing.settings import DTYPES as QUANTIZED_DTYPES
from trtrun.tools.quantizing.settings import FORMATS, KV_CACHES, QuantizingSettings
from trtrun.tools.quantizing.settings import LAYOUTS as QUANTIZED_LAYOUTS
from trtrun.weights.written_files import find_unfinished


def note_tokenizer(output: Path, source: str) -> None:
    """Say where `output` has no tokenizer, as its source, a "checkpoint" or a "model", had none beside it."""
    from trtrun.tokens.text import hash_tokenizer_files

    if hash_tokenizer_files(output) == "none":
        line = f"the {source} has no tokenizer beside it: name one by tokenizer: in the YAML file"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)


def check_again(output: Path, check: Callable[[], None]) -> None:
    """`check`, by the one process that may write to `output` now; say where a command was killed as it wrote there."""
    check()
    command = find_unfinished(output)
    if command is not None:
        line = f"--output {shorten_path(output)}: what a killed `trtrun {command}` left goes, and all is written anew"
        print(f"trtrun: {line}", file=sys.stderr, flush=True)


def make_folders_above(output: Path) -> None:
    """Make the directories that `output` is to lie in, as TensorRT-LLM's own commands do.

    Raises:
        ConfigError: they cannot be made.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir {shorten_path(output)}: {error.strerror}") from None


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
    metavar="|".join(QUANTIZED_LAYOUTS),
    help="Of the files; modelopt and trtllm have fp8, static, and int4_awq without zero points.",
)
@click.option(
    "--tp-size",
    type=int,
    default=_DEFAULTS.tp_size,
    show_default=True,
    help="Ranks that are to share the model: without cutting a group (int4_awq), with a file each (trtllm).",
)
@click.option("--dtype", metavar="|".join(QUANTIZED_DTYPES), help="Of what stays plain.  [default: the checkpoint's]")
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


@dataclass(frozen=True)
class BuildOptions:
    """What was asked for.

    Attributes:
        checkpoint: of either layout.
        output: the directory to make.
        settings: of the engine.
        force: whether an engine that is there may be lost.
    """

    checkpoint: Path
    output: Path
    settings: BuildSettings
    force: bool = False


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Of either layout, or a name."
)
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Of the engine.")
@click.option("--tp", "--tp-size", "tp_size", type=int, default=1, show_default=True, help="Devices of the engine.")
@click.option(
    "--dtype", default="auto", metavar="|".join(BUILT_DTYPES), help="Of activations.  [default: the checkpoint's]"
)
@click.option("--quantization", default="none", help="Of plain weights, as in the YAML file: fp8, fp8_weight_only, …")
@click.option(
    "--device", metavar="|".join(DEVICES), help="What it is for.  [default: cuda where there is a GPU, else cpu]"
)
@click.option("--max-batch-size", type=int, help="Most rows of its jobs.  [default: no limit]")
@click.option("--max-num-tokens", type=int, help="Most tokens of a round.  [default: no limit]")
@click.option("--max-seq-len", type=int, help="Most tokens of a request.  [default: the model's context]")
@click.option("--max-draft-len", type=int, help="Most draft tokens of a row.  [default: no limit]")
@click.option("--force", is_flag=True, help="Build anew where an engine is.")
def build(
    checkpoint: Path,
    output: Path,
    tp_size: int,
    dtype: str,
    quantization: str,
    device: str | None,
    force: bool,
    **limits: int | None,
) -> int:
    """Build an engine of a checkpoint: a directory that starts faster and gives the same texts.

    Weights lie in it as kernels want them, a file for each device, with limits in place of the scheduler's defaults.
    `target.model` and `draft.model` name it. The last line is JSON.
    """
    settings = BuildSettings(tp_size, dtype, quantization, device, Limits(**limits))
    return run_build(BuildOptions(checkpoint, output, settings, force))


def run_build(options: BuildOptions) -> int:
    """Do it; returns the exit status.

    Raises:
        TrtrunError: something is wrong with the options or the checkpoint.
        FailedError: the output cannot be written any more.
    """
    from trtrun.configuration.model_paths import find_model
    from trtrun.tools.building.settings import building, check_output

    checkpoint, output = find_model(options.checkpoint, None, "--checkpoint"), options.output
    check = partial(check_output, output, checkpoint, options.force)
    check()
    from launch.jobs.terminal import Bar
    from trtrun.tools.building.engine_builder import EngineBuilder

    started, builder = time.monotonic(), EngineBuilder.open(checkpoint, options.settings)
    try:
        with building(output, partial(check_again, output, check)) as folder, Bar("written", in_bytes=True) as bar:
            engine = builder.write(folder, __version__, bar.update)
    except OSError as error:
        raise FailedError(f"cannot write below {output}: {error.strerror}") from error
    result = {
        "output": str(output),
        "tp_size": engine.tp_size,
        "dtype": engine.dtype,
        "quantization": engine.quantization if engine.quant_method is None else engine.quant_method,
        "built_for": engine.built_for,
        "bytes": sum(shard.bytes for shard in engine.shards),
        "seconds": round(time.monotonic() - started, 3),
    }
    print(json.dumps(result), flush=True)
    note_tokenizer(output, "checkpoint")
    return ExitCode.DONE


LAYOUTS = ("trtllm", "huggingface")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ConvertOptions:
    """What was asked for.

    Attributes:
        model: checkpoint of either layout.
        output: the directory to make.
        layout: one of LAYOUTS.
        tp_size: ranks that it is cut for (trtllm).
        dtype: of what is plain; None keeps the checkpoint's.
        force: whether a checkpoint that is there may be lost.
    """

    model: Path
    output: Path
    layout: str = "trtllm"
    tp_size: int = 1
    dtype: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that there is not, or outside its range."""
        if self.layout not in LAYOUTS:
            raise ConfigError(f"--layout: unknown value '{self.layout}'{nearest(self.layout, LAYOUTS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown value '{self.dtype}'{nearest(self.dtype, DTYPES)}")
        if self.tp_size < 1:
            raise ConfigError(f"--tp-size is {self.tp_size}: it must be 1 or more")
        if self.tp_size > 1 and self.layout == "huggingface":
            raise ConfigError("--tp-size: Hugging Face directories are not cut, and any number of ranks reads them")


@click.command(epilog=f"Exit status: {describe_exit_codes()}")
@click.option("--model", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Of either layout.")
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The directory to make.")
@click.option("--layout", default=LAYOUTS[0], show_default=True, metavar="|".join(LAYOUTS), help="Of its files.")
@click.option("--tp-size", type=int, default=1, show_default=True, help="Ranks that it is cut for (trtllm).")
@click.option("--dtype", metavar="|".join(DTYPES), help="Of what is plain.  [default: the checkpoint's]")
@click.option("--force", is_flag=True, help="Write over a checkpoint that is there.")
def convert(model: Path, output: Path, layout: str, tp_size: int, dtype: str | None, force: bool) -> int:
    """Convert between Hugging Face directories and TensorRT-LLM checkpoints (config.json, rankN.safetensors).

    trtrun reads both as they are, with any number of ranks. The last line is JSON.
    """
    return run_conversion(ConvertOptions(model, output, layout, tp_size, dtype, force))


def run_conversion(options: ConvertOptions) -> int:
    """Do it; returns the exit status.

    Raises:
        TrtrunError: something is wrong with the options or the model.
        FailedError: the output cannot be written any more.
    """
    from trtrun.configuration.model_paths import find_model
    from trtrun.tools.conversion.staged_output import check_output, staged

    model = find_model(options.model, None, "--model")
    check = partial(check_output, options.output, model, options.force)
    check()
    from launch.jobs.terminal import Bar
    from trtrun.tools.conversion.source import open_source
    from trtrun.tools.conversion.writers import write_hugging_face, write_ranks

    started, source, output = time.monotonic(), open_source(model, options.dtype), options.output
    try:
        with staged(output, partial(check_again, output, check)) as folder, Bar("written", in_bytes=True) as bar:
            if options.layout == "trtllm":
                size = write_ranks(source, folder, options.tp_size, bar.update)
            else:
                size = write_hugging_face(source, folder, bar.update)
    except OSError as error:
        raise FailedError(f"cannot write below {output}: {error.strerror}") from error
    result = {
        "output": str(output),
        "layout": options.layout,
        "tp_size": options.tp_size,
        "quant_algo": source.algorithm,
        "bytes": size,
        "seconds": round(time.monotonic() - started, 3),
    }
    print(json.dumps(result), flush=True)
    note_tokenizer(output, "model")
    return ExitCode.DONE
