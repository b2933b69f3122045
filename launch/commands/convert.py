"""`trtrun convert`: parse its command line and convert."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from launch.commands.written_models import check_again, note_tokenizer
from launch.exit_codes import ExitCode, FailedError, describe_exit_codes
from trtrun.errors import ConfigError, nearest

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
