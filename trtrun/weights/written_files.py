"""Files of a model directory: put in place whole while it is made, and why one cannot be read that is damaged."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from trtrun.configuration.model_paths import fetch_again
from trtrun.errors import ConfigError, shorten, shorten_path
from trtrun.files import put_in_place

BESIDE = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("generation_config.json", "chat_template*", "*.tiktoken", "spiece.model", "LICENSE*", "NOTICE*"),
    *("tiktoken.model", "tokenization_*.py", "tekken.json"),
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


def copy_beside(source: Path, output: Path) -> None:
    """Copy what belongs to a model beside its weights."""
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                temporary = output / f"{file.name}{NEW}"
                shutil.copyfile(file, temporary)
                put_in_place(temporary, output / file.name)


_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads."""

_OTHER_FORMATS = (
    (b"version https://git-lfs", "it is a Git LFS pointer in place of the file: fetch the file with `git lfs pull`"),
    (b"PK\x03\x04", "it is a zip archive, as PyTorch writes pickles: save the model as safetensors"),
    (b"\x80\x02", "it is a pickle: save the model as safetensors"),
    (b"GGUF", "it is a GGUF file: take the model as safetensors"),
    (b"\x89HDF", "it is an HDF5 file: save the model as safetensors"),
)


def describe_damage(file: Path, error: Exception) -> str:
    """Say what is wrong with a file, and what to do, in a few words that go on behind its name.

    Args:
        file: that could not be opened.
        error: what the library said.
    """
    said = shorten(str(error).rpartition("deserializing header: ")[2], 200).strip("'\"")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(64)
            length = _LENGTH.unpack(start[:8])[0] if len(start) >= 8 else 0
            header = opened.read(0)
            if size >= 8 + length and length <= _MOST_HEADER_BYTES:
                opened.seek(8)
                header = opened.read(length)
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    way = fetch_again(file.parent, "copy it again")
    if size < 8:
        return f"is truncated ({size} bytes); {way}"
    for mark, remedy in _OTHER_FORMATS:
        if start.startswith(mark):
            return f"is no safetensors file: {remedy}"
    if start[8:9] not in (b"{", b"") or length > _MOST_HEADER_BYTES:
        return f"is no safetensors file ({said})"
    needed = 8 + length + _count_data(header)
    if size < needed:
        return f"is truncated ({size} bytes of {needed}); {way}"
    return f"has a header that is wrong ({said}): {way}, or save the model anew"


def _count_data(header: bytes) -> int:
    """Bytes of tensors that a header speaks of; 0 where it cannot be read."""
    try:
        entries = json.loads(header)
        return max(int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return 0
