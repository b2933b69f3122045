"""Whether a model's files are still those that were read, for an engine that goes on where another one ended.

Small files count with their content, weights with size and time of change: reading them once more would take as long as
loading them. Inodes do not count, because some network file systems number files anew. It does not know what is in the
files, or who compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from trtrun.configuration.engine_directory import ENGINE_FILE
from trtrun.errors import CheckpointError
from trtrun.weights.checkpoint import INDEX_FILE, SINGLE_FILE, read_json
from trtrun.weights.quantization_config import QUANTIZATION_FILE

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Parts of a file of weights that are read, from its beginning to its end, and bytes of each."""

_CONFIGURATION = ("config.json", "generation_config.json", QUANTIZATION_FILE, ENGINE_FILE)


def hash_model_files(directory: Path, has_weights: bool = True, single_files: Sequence[str] = (SINGLE_FILE,)) -> str:
    """Tells configuration and weights of a model directory from others.

    Args:
        directory: in Hugging Face layout.
        has_weights: whether the weights are read; else they are made up from the configuration.
        single_files: names of a file that holds all weights, the first of which that is there counts.
    """
    if not has_weights:
        return hash_files(directory, _CONFIGURATION, ())
    for name in single_files:
        if (directory / name).is_file():
            return hash_files(directory, _CONFIGURATION, (name,))
    try:
        index = read_json(directory, INDEX_FILE, required=False)
    except CheckpointError:
        index = {}  # whoever loads it says what is wrong
    names = index.get("weight_map")
    shards = sorted(set(map(str, names.values()))) if isinstance(names, dict) else []
    shards = shards or sorted(file.name for file in directory.glob("rank*.safetensors"))  # TensorRT-LLM's, engines'
    return hash_files(directory, (*_CONFIGURATION, INDEX_FILE), shards)


def hash_model_samples(directory: Path) -> str:
    """Tells a model in safetensors from others wherever it lies, and whenever it was copied there: by config.json, and
    of each file its size and parts of what it holds, as reading all of it would take as long as loading it.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
        with open(file, "rb") as weights:
            for place in range(_SAMPLES):
                weights.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                found.update(weights.read(_SAMPLE_BYTES))
    return found.hexdigest()


def hash_files(directory: Path, read: Iterable[str], only_seen: Iterable[str]) -> str:
    """Digest of files that may be missing.

    Args:
        directory: of all of them.
        read: names of files that count with what they hold.
        only_seen: names of files that count with size and time.
    """
    found = hashlib.sha256()
    for name in read:
        try:
            content = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except OSError:
            content = "none"
        found.update(f"{name} {content}\n".encode(errors="surrogateescape"))
    for name in only_seen:
        try:
            status = (directory / name).stat()
            seen = f"{status.st_size} {status.st_mtime_ns}"
        except (OSError, ValueError):
            seen = "none"
        found.update(f"{name} {seen}\n".encode(errors="surrogateescape"))
    return found.hexdigest()
