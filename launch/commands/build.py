"""`trtrun build`: parse its command line and build."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from launch.commands.written_models import check_again, note_tokenizer
from launch.exit_codes import ExitCode, FailedError, describe_exit_codes
from trtrun import __version__
from trtrun.configuration.engine_directory import Limits
from trtrun.tools.building.settings import DEVICES, DTYPES, BuildSettings


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
@click.option("--dtype", default="auto", metavar="|".join(DTYPES), help="Of activations.  [default: the checkpoint's]")
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
    max_batch_size: int | None,
    max_num_tokens: int | None,
    max_seq_len: int | None,
    max_draft_len: int | None,
    force: bool,
) -> int:
    """Build an engine of a checkpoint: a directory that starts faster and gives the same texts.

    Weights lie in it as kernels want them, a file for each device, with limits in place of the scheduler's defaults.
    `target.model` and `draft.model` name it. The last line is JSON.
    """
    limits = Limits(max_batch_size, max_num_tokens, max_seq_len, max_draft_len)
    settings = BuildSettings(tp_size, dtype, quantization, device, limits)
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
