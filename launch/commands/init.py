"""`trtrun init`: parse its command line, and write the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from launch.commands.model_options import read_devices
from trtrun.errors import ConfigError


@click.command()
@click.argument("target", metavar="[MODEL]", required=False)
@click.option(
    "--model", metavar="MODEL", help="The target.  [default: the largest in the Hugging Face cache that fits]"
)
@click.option("--draft", metavar="MODEL", help="Draft model, or directory of heads.  [default: found in the cache]")
@click.option("--devices", callback=read_devices, metavar="D,D", help="The target's devices.  [default: what is here]")
@click.option(
    "--output", default="run.yaml", show_default=True, metavar="FILE", help='The file to write ("-": stdout).'
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def init(
    target: str | None,
    model: str | None,
    draft: str | None,
    devices: list[int | str] | None,
    output: str,
    force: bool,
) -> int:
    """Write a first YAML file: a placement for this host and the models that it has, with the reasons.

    It looks at GPUs, MPI, Slurm's partitions, and the Hugging Face cache, where it also looks for what may draft.
    Nothing is downloaded or started. Without GPUs and models the file is for the shipped pair on the CPU.
    """
    if target is not None and model is not None:
        raise click.UsageError(f"{target!r} and --model {model} are two models: name one")
    file = Path(output)
    if file.is_dir():
        raise ConfigError(f"--output: {file} is a directory: name a file")
    if output != "-" and not force and os.path.lexists(file):
        raise ConfigError(f"{file} is there already: --force writes over it, --output names another file")
    from launch.init.first_config import Given, look, make_first_config

    text = make_first_config(look(), Given("run.yaml" if output == "-" else output, target or model, draft, devices))
    if output == "-":
        print(text, end="")
        return 0
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    print(f"trtrun: {file} is written; next: trtrun check --config {file}", file=sys.stderr, flush=True)
    return 0
