"""Files of a model directory that is being made: each is put in place whole, and what belongs beside weights is copied.

It knows paths. It does not know what is in the files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trtrun.errors import ConfigError, shorten_path

BESIDE = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("generation_config.json", "chat_template*", "*.tiktoken", "spiece.model", "LICENSE*", "NOTICE*"),
)
"""What runtimes read beside weights and config.json, and terms of use."""

NEW = ".new"
"""End of the names of files that are not whole yet."""

FOLDERS = {"build": "building", "convert": "converting", "quantize": "quantizing"}
"""In a directory, until all of it is written: of which command."""

MARKER = "trtrun-convert.unfinished"
"""A file of the folder of a build or a conversion, the first to come and the last to go."""

RUN = "run.json"
"""In the folder of a quantization: settings, model and texts. A folder of that name without it is somebody else's."""


def check_place(output: Path, source: Path | None = None) -> None:
    """Check that a directory can be made at `output`, and that `source`, the model that is read, would not be lost.

    Raises:
        ConfigError: it cannot, or would be.
        OSError: nothing can be seen there.
    """
    where = shorten_path(output)
    if (output.exists() or output.is_symlink()) and not output.is_dir():
        raise ConfigError(f"--output {where}: it is no directory")
    try:
        place = output.resolve()
    except RuntimeError:  # Python 3.13 raises OSError
        raise ConfigError(f"--output {where}: its symbolic links lead in a circle") from None
    if not place.parent.is_dir():
        raise ConfigError(f"--output {where}: the directory {shorten_path(place.parent)} does not exist")
    if source is not None and place == source.resolve():
        raise ConfigError(f"--output {where}: that is the model itself; name another directory")
    if source is not None and place in source.resolve().parents:
        raise ConfigError(f"--output {where}: the model lies in it; name another directory")


def find_unfinished(directory: Path) -> str | None:
    """The command that was killed as it wrote a model's directory, or writes it now; None where there is none."""
    for command, folder in FOLDERS.items():
        if (directory / folder / (RUN if command == "quantize" else MARKER)).is_file():
            return command
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a small file, so that at any moment it is the old one or the new one."""
    temporary = path.with_name(f"{path.name}{NEW}")
    temporary.write_text(text, encoding="utf-8")
    put_in_place(temporary, path)


def put_in_place(temporary: Path, path: Path) -> None:
    """A file in the place of another, and on the disk before that."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def copy_beside(source: Path, output: Path) -> None:
    """Copy what belongs to a model beside its weights."""
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                temporary = output / f"{file.name}{NEW}"
                shutil.copyfile(file, temporary)
                put_in_place(temporary, output / file.name)
