"""The directory that an engine is built to: what is there stays whole until all of the new one is.

It knows names of files. It does not know what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from trtrun.configuration.engine_directory import ENGINE_FILE, was_built
from trtrun.errors import ConfigError, shorten_path
from trtrun.tools.conversion import staged_output
from trtrun.tools.conversion.staged_output import is_unfinished, staged
from trtrun.weights.written_files import BESIDE, FOLDERS, MARKER

FOLDER = FOLDERS["build"]
SHARDS = "rank*.safetensors"
CACHE = "cache"
"""What starts leave."""

_KNOWN = (ENGINE_FILE, SHARDS, "config.json", *BESIDE)
"""What a build puts in place."""


def check_output(output: Path, checkpoint: Path, is_forced: bool) -> None:
    """Check that nothing is lost that nobody gave up. What a killed build left is written over.

    Raises:
        ConfigError: something would be lost, or the directory cannot be made.
    """
    staged_output.check_output(output, checkpoint, is_forced, _check_files)


def _check_files(output: Path, is_forced: bool) -> None:
    where, folder = shorten_path(output), output / FOLDER
    others = sorted(file for file in output.iterdir() if file != folder or not is_unfinished(folder))
    if not others or _was_killed(folder, others, is_forced):
        return
    if not was_built(output):
        raise ConfigError(f"--output {where}: it is not empty, and trtrun build has not made it: name another one")
    in_the_way = [one.name for one in others if one == folder or (_is_known(one.name) and _is_folder(one))]
    if in_the_way:
        raise ConfigError(f"--output {where}: trtrun build has not made its {in_the_way[0]}: name another directory")
    if not is_forced:
        raise ConfigError(f"--output {where}: an engine is there; --force builds it anew")


def _was_killed(folder: Path, others: Sequence[Path], is_forced: bool) -> bool:
    """Whether what is there was left by a build that was killed as it put files in place: before config.json is there
    nothing is taken for an engine. Files of others stay beside, if somebody says so."""
    if folder in others or not (folder / MARKER).is_file():
        return False
    known = all(file.name == CACHE or (_is_known(file.name) and not _is_folder(file)) for file in others)
    return (known or is_forced) and all(file.name != "config.json" for file in others)


def _is_known(name: str) -> bool:
    return any(fnmatch(name, known) for known in _KNOWN)


def _is_folder(file: Path) -> bool:
    """Whether it is a directory itself."""
    return file.is_dir() and not file.is_symlink()


@contextmanager
def building(output: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to write an engine to; see `staged`."""
    with staged(output, check, FOLDER, (ENGINE_FILE, SHARDS)) as folder:
        yield folder
