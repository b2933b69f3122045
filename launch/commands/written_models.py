"""What commands that write a model's directory say of it, and the place for it.

It knows the directory. It does not know how it was made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from trtrun.errors import ConfigError, shorten_path
from trtrun.weights.written_files import find_unfinished


def note_tokenizer(output: Path, source: str) -> None:
    """Say where `output` has no tokenizer, as its source, a "checkpoint" or a "model", had none beside it."""
    if not any((output / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
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
