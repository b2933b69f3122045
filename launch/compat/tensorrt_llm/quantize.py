"""The command line of TensorRT-LLM's examples/quantization/quantize.py, answered by `trtrun quantize`.

Behind scripts/quantize.py. What it makes is a Hugging Face directory, which the other commands take where
TensorRT-LLM's take engines. It knows that command line, and nothing of how a checkpoint is quantized.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from launch.cli import guarded, leave
from launch.commands.write_models import make_folders_above, run_quantization
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser, naming_options
from launch.quantize.options import QuantizeOptions, parse_device_names
from trtrun.errors import nearest
from trtrun.tools.quantizing.settings import QuantizingSettings

FORMATS = {"fp8": "fp8", "fp8_pb_wo": "fp8_block", "int4_awq": "int4_awq", "int8_sq": "int8_sq"}
"""By `--qformat`."""

DATA_SETS = ("cnn_dailymail", "ccdv/cnn_dailymail", "pileval", "wikitext", "minipile")
"""Names that the original downloads; the first is its default. Here a file of that name is read, NAME.jsonl."""

CHARACTERS_OF_A_TEXT = 2400
"""A piece of documentation has so many: about as many tokens as the original takes of a text."""


OPTIONS = {
    "--model": "--model_dir",
    "--output": "--output_dir",
    "--format": "--qformat",
    "--kv-cache": "--kv_cache_dtype",
    "--calibration": "--calib_dataset",
    "--samples": "--calib_size",
    "--max-length": "--calib_max_seq_length",
    "--group-size": "--awq_block_size",
    "--tp-size": "--tp_size",
}
"""By the names that trtrun's own command has for them."""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of quantize.py.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
    """
    parser = LenientParser(prog="quantize.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model_dir", required=True, help="The plain checkpoint.")
    parser.add_argument("--output_dir", required=True, help="Of the quantized one.")
    parser.add_argument("--dtype", default="auto", help="Of what stays plain; auto keeps the checkpoint's.")
    parser.add_argument("--qformat", required=True, help=", ".join(FORMATS))
    parser.add_argument("--kv_cache_dtype", help="fp8 or int8: scales for keys and values.")
    parser.add_argument("--calib_dataset", default=DATA_SETS[0], help="A file of texts.")
    parser.add_argument("--calib_size", type=int, default=512, help="Texts.")
    parser.add_argument("--calib_max_seq_length", type=int, default=512, help="Tokens of a text.")
    parser.add_argument("--awq_block_size", type=int, default=128, help="Input features with one scale.")
    parser.add_argument("--tp_size", type=int, default=1, help="Ranks that are to share the model.")
    parser.add_argument("--pp_size", type=int, default=1, help="Only 1.")
    parser.add_argument("--cp_size", type=int, default=1, help="Only 1.")
    parser.add_argument("--batch_size", type=int, help="Taken, and not needed: batches are as large as is good.")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cuda is the CPU where there is none."
    )
    parser.add_argument("--force", action="store_true", help="Begin anew where a checkpoint or another run is.")
    arguments = parser.parse_mended(words)
    if arguments.qformat not in FORMATS:
        raise click.UsageError(f"--qformat '{arguments.qformat}' is not supported{nearest(arguments.qformat, FORMATS)}")
    for name in ("pp_size", "cp_size"):
        if getattr(arguments, name) != 1:
            raise click.UsageError(f"--{name} {getattr(arguments, name)}: only tensor parallelism is supported")
    return arguments


def make_options(arguments: argparse.Namespace) -> QuantizeOptions:
    """What the options ask for.

    Raises:
        click.UsageError: texts are needed, and there are none.
        ConfigError: a value is outside its range.
    """
    settings = QuantizingSettings(
        FORMATS[arguments.qformat],
        arguments.kv_cache_dtype,
        group_size=arguments.awq_block_size,
        samples=arguments.calib_size,
        max_length=arguments.calib_max_seq_length,
        dtype=None if arguments.dtype == "auto" else arguments.dtype,
        tp_size=arguments.tp_size,
    )
    return QuantizeOptions(
        model=Path(arguments.model_dir),
        output=Path(arguments.output_dir),
        calibration=_find_texts(arguments.calib_dataset, settings.needs_texts),
        held_out=None,
        devices=parse_device_names("cpu:0") if arguments.device == "cpu" else (),
        resume=False,
        force=arguments.force,
        settings=settings,
    )


def _find_texts(name: str, needs_texts: bool) -> Path | None:
    """The file of texts that a data set's name, or a path, stands for; None where none are needed, or Python's own
    documentation does (`run`)."""
    if name not in DATA_SETS or Path(name).is_file():
        return Path(name)
    saved = Path(f"{name.rpartition('/')[2]}.jsonl")
    return saved if needs_texts and saved.is_file() else None


@contextmanager
def _with_texts(options: QuantizeOptions, name: str) -> Iterator[QuantizeOptions]:
    """Options that have texts where they need some: data sets are not downloaded, and Python's own documentation is
    on every machine."""
    if options.calibration is not None or not options.settings.needs_texts:
        yield options
        return
    with TemporaryDirectory(prefix="quantize-") as folder:
        path = Path(folder) / "python_documentation.jsonl"
        topics = [topic for _, topic in sorted(read_documentation().items())]
        size = CHARACTERS_OF_A_TEXT
        pieces = [topic[start : start + size] for topic in topics for start in range(0, len(topic), size)]
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")
        print(
            f"quantize.py: {name} is not downloaded: Python's documentation is calibrated with; save texts like yours "
            f'as {name.rpartition("/")[2]}.jsonl here, lines of {{"text": "…"}}, or give --calib_dataset FILE.jsonl',
            file=sys.stderr,
            flush=True,
        )
        yield replace(options, calibration=path)


def read_documentation() -> Mapping[str, str]:
    """Texts of `help()` on the language, some seventy thousand words, by topic.

    Raises:
        click.UsageError: this Python has none.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise click.UsageError(
            '--calib_dataset: there are no texts here: give a FILE.jsonl of lines as {"text": "…"}'
        ) from None
    return dict(topics)


def run(words: Sequence[str]) -> int:
    """Quantize what the command line asks for; returns the exit status."""
    with naming_options(OPTIONS):
        arguments = parse_arguments(words)
        with _with_texts(make_options(arguments), arguments.calib_dataset) as options:
            make_folders_above(options.output)
            return run_quantization(options)


def main() -> None:
    """Entry of scripts/quantize.py."""
    leave(guarded(lambda: run(sys.argv[1:])))
