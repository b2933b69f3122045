"""The directory of a quantized checkpoint while it is made, and when it is done.

A shard for the ends of the model and one for each layer, each put in place whole; config.json comes last, so that no
runtime takes what is unfinished for a model. What a killed run leaves behind is told by the folder `quantizing`, which
is gone in the end. It knows tensors with names. It does not know what they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, ConfigError, RustLibrary, one_line, shorten_path, wrap_errors
from trtrun.files import put_in_place
from trtrun.weights.checkpoint import INDEX_FILE
from trtrun.weights.written_files import BESIDE, FOLDERS, NEW, RUN, check_place, copy_beside, write_whole

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = FOLDERS["quantize"]
REPORT = "quantization_report.jsonl"
IDENTITY = "identity"
"""Key of the run's identity, in the last line of its report."""
_LIBRARY = RustLibrary("safetensors")
_OS_ERROR = re.compile(r"os error (\d+)")
"""In what safetensors says of a file that cannot be written."""


class QuantizedDirectory:
    """Where a quantized checkpoint is made.

    Args:
        path: the directory.
        num_shards: of the checkpoint.
        is_converted: whether the checkpoint is one of Hugging Face's layout in `state` first.

    Attributes:
        path: where the shards are, and what belongs to them.
    """

    def __init__(self, path: Path, num_shards: int, is_converted: bool = False) -> None:
        self._output, self._num_shards = path, num_shards
        self._state = path / FOLDER
        self.path = self._state / "model" if is_converted else path
        self._identity = self._state / RUN
        self._lines = self._state / REPORT

    def begin(self, identity: Mapping[str, Any], is_forced: bool) -> None:
        """Go on with what a killed run of the same identity left, or begin.

        Args:
            identity: settings, model and texts.
            is_forced: whether what is there otherwise may be lost.

        Raises:
            ConfigError: it would be lost.
        """
        known = json.loads(json.dumps(identity))
        with wrap_errors(self._identity, ConfigError):
            found = json.loads(self._identity.read_text(encoding="utf-8")) if self._identity.is_file() else None
        if found and not is_forced:  # an empty one is that of a run that was killed as it cleared away
            different = _find_difference(known, found)
            if different is not None:
                raise ConfigError(
                    f"--output {shorten_path(self._output)}: it holds a run with another {different}: go on with that, "
                    "or begin anew with --force"
                )
        else:
            if is_forced or found is not None:
                self._clear()
            self._state.mkdir(parents=True, exist_ok=True)
            write_whole(self._identity, json.dumps(known, sort_keys=True) + "\n")
        self.path.mkdir(exist_ok=True)

    def _clear(self) -> None:
        """Take an earlier checkpoint away, config.json first: without it nothing is a model. An empty identity tells
        that what is left may go, too."""
        (self._output / "config.json").unlink(missing_ok=True)
        self._lines.unlink(missing_ok=True)
        self._state.mkdir(parents=True, exist_ok=True)
        write_whole(self._identity, "{}\n")
        # A tokenizer of another model would be read with the new weights.
        for pattern in (INDEX_FILE, "model*.safetensors", "rank*.safetensors", "*.new", REPORT, *BESIDE):
            for file in self._output.glob(pattern):
                if file.is_symlink() or not file.is_dir():
                    file.unlink()
        _empty(self._state)

    def shard(self, index: int) -> Path:
        """The file of a shard, counted from 0."""
        return self.path / f"model-{index + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def has_shard(self, index: int) -> bool:
        """Whether it was written, as a whole."""
        return self.shard(index).is_file() and len(self.read_lines()) > index

    def write_shard(self, index: int, tensors: Mapping[str, Tensor], line: Mapping[str, Any]) -> None:
        """Put a shard in place, and a line of the report behind the others.

        Raises:
            OSError: the disk is full, or otherwise takes no more.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        temporary = self.shard(index).with_suffix(NEW)
        try:
            with _LIBRARY:
                save_file(dict(tensors), temporary, {"format": "pt"})
        except SafetensorError as error:
            found = _OS_ERROR.search(str(error))
            if found is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(temporary)) from error
        os.chmod(temporary, 0o644)
        put_in_place(temporary, self.shard(index))
        lines = [*self.read_lines()[:index], dict(line)]
        write_whole(self._lines, "".join(json.dumps(one) + "\n" for one in lines))

    def read_shard(self, index: int) -> dict[str, Tensor]:
        """The tensors of a shard.

        Raises:
            CheckpointError: it is damaged.
        """
        from safetensors.torch import load_file

        with self._reading_shard(index):
            return load_file(self.shard(index))

    @contextmanager
    def _reading_shard(self, index: int) -> Iterator[None]:
        try:
            with _LIBRARY:
                yield
        except Exception as error:
            raise CheckpointError(
                f"{self.shard(index)} is damaged ({one_line(error)}): delete it, and the same command makes it again"
            ) from None

    def read_lines(self) -> list[dict[str, Any]]:
        """The report so far: a line for each shard."""
        if not self._lines.is_file():
            return []
        with wrap_errors(self._lines, ConfigError):
            return [json.loads(line) for line in self._lines.read_text(encoding="utf-8").splitlines()]

    def finish(self, source: Path, config: Mapping[str, Any]) -> int:
        """Write the index, copy what belongs to the model, and let it be one; returns the bytes of the weights.

        Args:
            source: the model that was quantized.
            config: config.json.

        Raises:
            CheckpointError: a shard is damaged.
        """
        from safetensors import safe_open

        places: dict[str, str] = {}
        for index in range(self._num_shards):
            with self._reading_shard(index), safe_open(self.shard(index), "np") as file:
                places |= dict.fromkeys(file.keys(), self.shard(index).name)
        num_bytes = sum(self.shard(index).stat().st_size for index in range(self._num_shards))
        map_of_weights = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
        write_whole(self.path / INDEX_FILE, json.dumps(map_of_weights, indent=2) + "\n")
        copy_beside(source, self.path)
        write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        return num_bytes

    def close(self, summary: Mapping[str, Any]) -> None:
        """Put the report in place, and forget the run.

        Args:
            summary: last line of the report.
        """
        lines = [*self.read_lines()[: self._num_shards], dict(summary)]
        write_whole(self._output / REPORT, "".join(json.dumps(line) + "\n" for line in lines))
        forget_run(self._output)


def forget_run(output: Path) -> None:
    """Take away what a run has left beside a finished checkpoint, last of all what tells that it is a run's."""
    state = output / FOLDER
    if _is_begun(output):
        _empty(state)
        (state / RUN).unlink(missing_ok=True)
        state.rmdir()


def _empty(state: Path) -> None:
    """Take all away but the identity."""
    for one in state.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        elif one.name != RUN:
            one.unlink()


def _is_begun(output: Path) -> bool:
    """Whether the folder is a run's: it has an identity, or nothing yet."""
    state = output / FOLDER
    if not state.is_dir():
        return False
    return (state / RUN).is_file() or all(file.name == f"{RUN}{NEW}" for file in state.iterdir())


def check_output(output: Path, source: Path, is_forced: bool) -> None:
    """Raise ConfigError for a directory that would lose something, or cannot be made."""
    where = shorten_path(output)
    try:
        check_place(output, source)
        if not output.is_dir():
            return
        others = [file for file in output.iterdir() if file.name != FOLDER]
        was_made_here = (output / REPORT).is_file()
        if was_made_here and not is_forced and (is_finished(output) or not (output / FOLDER / RUN).is_file()):
            raise ConfigError(f"--output {where}: a quantized checkpoint is there; --force makes it anew")
        is_run = (output / FOLDER / RUN).is_file() or (not others and _is_begun(output))
        if was_made_here or is_run or not any(output.iterdir()):
            return
        raise ConfigError(f"--output {where}: it is not empty, and was not made by trtrun quantize: name another one")
    except OSError as error:
        raise ConfigError(f"--output {where}: {error.strerror}") from None


def read_report(output: Path) -> list[dict[str, Any]]:
    """The report of a finished checkpoint: a line for each shard, and the summary.

    Raises:
        ConfigError: it is damaged.
    """
    file = output / REPORT
    with wrap_errors(file, ConfigError):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not lines or not isinstance(lines[-1], dict) or IDENTITY not in lines[-1]:
        raise ConfigError(f"{shorten_path(file)} does not end in a summary: --force makes the checkpoint anew")
    return lines


def find_tp_size(checkpoint: Path) -> int:
    """Ranks that `trtrun quantize` made a checkpoint for; 1 for any other."""
    try:
        found = read_report(checkpoint)[-1][IDENTITY]["tp_size"]
    except (ConfigError, KeyError, TypeError):
        return 1
    return found if isinstance(found, int) and found > 0 else 1


def check_finished(output: Path, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError for a finished checkpoint that a run of another identity made."""
    different = _find_difference(json.loads(json.dumps(identity)), read_report(output)[-1][IDENTITY])
    if different is not None:
        raise ConfigError(
            f"--output {shorten_path(output)}: a checkpoint with another {different} is there: name another directory, "
            "or make it anew with --force"
        )


def _find_difference(known: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Name the first thing in which an earlier run's identity differs."""
    return next((name for name in known if found.get(name) != known[name]), None)


def is_finished(output: Path) -> bool:
    """Whether a quantized checkpoint is there, whole: the report is put in place last, and config.json goes first."""
    return (output / REPORT).is_file() and (output / "config.json").is_file()
