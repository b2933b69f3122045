"""The directory that an engine is built to: what is there stays whole until all of the new one is.

It knows names of files. It does not know what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from trtrun.configuration.engine_directory import ENGINE_FILE, is_engine
from trtrun.conversion.staged_output import MARKER, is_unfinished, staged
from trtrun.errors import ConfigError, shorten_path
from trtrun.models.written_files import BESIDE, check_place

FOLDER = "building"
SHARDS = "rank*.safetensors"
_KNOWN = (ENGINE_FILE, SHARDS, "cache", "config.json", *BESIDE)
"""What a build puts in place, and what starts leave beside it."""


def check_output(output: Path, checkpoint: Path, is_forced: bool) -> None:
    """Check that nothing is lost that nobody gave up. What a killed build left is written over.

    Raises:
        ConfigError: something would be lost, or the directory cannot be made.
    """
    where = shorten_path(output)
    try:
        check_place(output, checkpoint)
        if not output.is_dir() or not any(output.iterdir()):
            return
        if is_engine(output):
            if is_forced:
                return
            raise ConfigError(f"--output {where}: an engine is there; --force builds it anew")
        if not _was_killed(output):
            raise ConfigError(f"--output {where}: it is not empty, and trtrun build has not made it: name another one")
    except OSError as error:
        raise ConfigError(f"--output {where}: {error.strerror}") from None


def _was_killed(output: Path) -> bool:
    """Whether all that is there is what a killed build has left: its folder, and files that it has put in place."""
    folder = output / FOLDER
    others = [one.name for one in output.iterdir() if one != folder]
    if not folder.is_dir() or folder.is_symlink() or not is_unfinished(folder):
        return False
    is_marked = (folder / MARKER).is_file()
    return not others or (is_marked and all(any(fnmatch(name, known) for known in _KNOWN) for name in others))


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """A folder to write an engine to; see `staged`."""
    with staged(output, FOLDER, (ENGINE_FILE, SHARDS)) as folder:
        yield folder
