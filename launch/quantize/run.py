"""A run of `trtrun quantize`, and what the user sees of it: a bar, a table of layers, one line of JSON.

The arithmetic is `trtrun.tools.quantizing`'s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from launch.exit_codes import ExitCode, FailedError
from launch.jobs.mpi.drain import Drain
from launch.jobs.terminal import Bar, output_console
from launch.quantize.options import QuantizeOptions
from trtrun.errors import ConfigError
from trtrun.models.config import read_model_config
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.quantizing.checkpoint_quantizer import CheckpointQuantizer, identify
from trtrun.tools.quantizing.directory import check_finished, forget_run, is_finished, read_report
from trtrun.tools.quantizing.texts import CalibrationTexts, read_texts

COLUMNS = (
    ("layer", "layer"),
    ("error", "error"),
    ("error_with_rounded_activations", "with activations"),
    ("held_out_error", "held-out"),
    ("k_scale", "k_scale"),
    ("v_scale", "v_scale"),
    ("seconds", "s"),
)
"""Of the table: key of the report, and heading."""


def play_quantization(options: QuantizeOptions, drain: Drain) -> int:
    """Do the run; returns the exit status.

    Raises:
        TrtrunError: the model, the texts or the output are wrong.
        FailedError: the output cannot be written any more.
    """
    is_done = options.resume and not options.force and is_finished(options.output)
    slots = [] if is_done else find_slots(options.devices)
    model, tokenizer = read_model_config(options.model), read_tokenizer(options.model)
    # Beyond its context a model says nothing of itself.
    lengths = replace(options.settings, max_length=min(options.settings.max_length, model.max_position_embeddings))
    with Bar("reading texts"):
        texts = read_texts(options.calibration, options.held_out, tokenizer, lengths, model.vocab_size)
    try:
        if is_done:
            check_finished(options.output, identify(options.model, options.settings, texts))
            forget_run(options.output)
            tell("nothing left to quantize")
        elif not quantize_layers(options, texts, slots, drain):
            tell(f"{drain.cause}: some layers are left; the same command does the rest")
            return ExitCode.DRAINED
    except OSError as error:
        raise FailedError(f"cannot write below {options.output}: {error.strerror}; the same command goes on") from error
    except torch.cuda.OutOfMemoryError:
        raise FailedError(
            "a GPU has too little memory for a layer and the texts: take more --devices, or shorter or fewer texts "
            "(--max-length, --samples) with --force"
        ) from None
    show_report(options.output)
    return ExitCode.DONE


def quantize_layers(
    options: QuantizeOptions, texts: CalibrationTexts, slots: Sequence[torch.device], drain: Drain
) -> bool:
    """Begin or go on, with a bar; returns whether it was done to the end.

    Raises:
        TrtrunError: the model or the output is wrong.
        OSError: the output cannot be written.
    """
    quantizer = CheckpointQuantizer(options.model, options.output, options.settings, texts, slots)
    done, count = quantizer.begin(options.force), quantizer.num_layers
    begun = f"goes on behind layer {done} of {count}" if done else f"begins {count} layers"
    tell(
        f"{options.settings.format}: {begun} on {', '.join(map(str, slots))}, {len(texts.samples)} samples, "
        f"{len(texts.held_out)} held-out texts"
    )
    drain.start_running()
    with Bar("layers") as bar:
        bar.update(done, count)
        return quantizer.run(bar.update, lambda: drain.cause is not None) is not None


def find_slots(names: Sequence[str]) -> list[torch.device]:
    """The devices to compute on.

    Raises:
        ConfigError: this machine lacks one.
    """
    if not names:
        return [torch.device("cuda:0" if torch.cuda.is_available() else "cpu")]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name in names:
        kind, _, number = name.partition(":")
        if kind == "cuda" and int(number) >= count:
            raise ConfigError(f"--devices: there is no {name} here: this machine has {count} GPUs that torch can use")
    return [torch.device(name) for name in names]


def show_report(output: Path) -> None:
    """Print the report of a finished checkpoint: a table, and its last line as it is."""
    lines = read_report(output)
    layers = [line for line in lines if "layer" in line]
    columns = [(key, heading) for key, heading in COLUMNS if any(key in line for line in layers)]
    table = Table(title=None)
    for _, heading in columns:
        table.add_column(heading, justify="right")
    for line in layers:
        table.add_row(*(_figure(line.get(key)) for key, _ in columns))
    console = output_console()
    console.print(table)
    console.print(describe_summary(lines[-1]), soft_wrap=True)
    print(json.dumps(lines[-1]), flush=True)


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Bytes, seconds and perplexity in words."""
    before, after = summary["bytes_before"], summary["bytes_after"]
    parts = [f"{before / 1e6:,.1f} MB → {after / 1e6:,.1f} MB ({after / before:.0%}) in {summary['seconds']:,.1f} s"]
    if "perplexity_after" in summary:
        held_out = f"{summary['held_out_tokens']} held-out tokens"
        parts.append(f"perplexity of {held_out} {summary['perplexity_before']} → {summary['perplexity_after']}")
    else:
        parts.append("no perplexity: there were no texts to measure on (--held-out FILE.jsonl, or --calibration)")
    if "perplexity_with_rounded_activations" in summary:
        parts.append(f"{summary['perplexity_with_rounded_activations']} where activations are rounded, too")
    if "rounded_to_nearest" in summary:
        parts.append(
            f"{summary['rounded_to_nearest']} experts saw too few tokens and are rounded to nearest (the report names "
            "them): more --samples help"
        )
    return ", ".join(parts)


def tell(text: str) -> None:
    """Say something to the user, beside the result."""
    print(f"trtrun: {text}", file=sys.stderr, flush=True)


def _figure(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
