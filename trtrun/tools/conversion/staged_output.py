"""The directory that a checkpoint is converted to: what is there stays whole until all of the new one is.

New files go into the folder `converting` first, with a marker by which a later conversion knows what a killed one has
left. Two at once would take each other's files away, so that the second is refused. It knows names of files. It does
not know what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trtrun.errors import ConfigError, shorten_path
from trtrun.weights.checkpoint import INDEX_FILE
from trtrun.weights.written_files import BESIDE, FOLDERS, MARKER, check_place

FOLDER = FOLDERS["convert"]

_CONFIG = "config.json"
_WEIGHTS = ("rank*.safetensors", "model*.safetensors", INDEX_FILE)


def check_output(
    output: Path, source: Path, is_forced: bool, check_files: Callable[[Path, bool], None] | None = None
) -> None:
    """Check that nothing is lost that nobody gave up. What a killed conversion left is written over.

    Args:
        output: the directory.
        source: the model that is read.
        is_forced: whether a model that is there may be lost.
        check_files: what a directory that is there may have; None as conversion has it.

    Raises:
        ConfigError: something would be lost, or the directory cannot be made.
    """
    where = shorten_path(output)
    try:
        check_place(output, source)
        if output.is_dir():
            (check_files or _check_files)(output, is_forced)
    except OSError as error:
        raise ConfigError(f"--output {where}: {error.strerror}") from None


def _check_files(output: Path, is_forced: bool) -> None:
    where, folder = shorten_path(output), output / FOLDER
    files = sorted(file for file in output.iterdir() if file != folder or not is_unfinished(folder))
    known = (_CONFIG, *_WEIGHTS, *BESIDE)
    others = [file.name for file in files if file.is_dir() or not any(map(file.match, known))]
    if others:
        raise ConfigError(f"--output {where}: it has {others[0]}, and is not written over: name another directory")
    if is_forced or not files:
        return
    if (output / _CONFIG).exists():
        raise ConfigError(f"--output {where}: a checkpoint is there; --force writes over it")
    if not (folder / MARKER).is_file():
        raise ConfigError(f"--output {where}: it has {files[0].name}; --force writes over what is there")


def is_unfinished(folder: Path) -> bool:
    """Whether `staged` made it; empty, it was killed at its first or last step."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    return is_folder and ((folder / MARKER).is_file() or not any(folder.iterdir()))


@contextmanager
def staged(
    output: Path, check: Callable[[], None], name: str = FOLDER, replaced: Sequence[str] = _WEIGHTS
) -> Iterator[Path]:
    """A folder to write a model to. It takes the place of the one in `output` when the block ends, config.json last;
    where the block raises, nothing has changed.

    Args:
        output: a directory that `check` has passed.
        check: `check_output`, or one like it: what it has seen may be another's by now.
        name: of the folder in it, until then.
        replaced: patterns of files that are taken away before new ones come, beside config.json and what belongs
            beside weights: a tokenizer of another model would be read.

    Raises:
        ConfigError: another process writes there; or as of `check`.
        OSError: it cannot be written.
    """
    folder, is_new = output / name, not output.is_dir()
    output.mkdir(exist_ok=True)
    with _locked(output):
        try:
            check()
            _remove(folder)
            folder.mkdir()
            (folder / MARKER).touch()
            yield folder
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                if is_unfinished(folder):
                    _remove(folder)
                if is_new:
                    output.rmdir()
            raise
        _put_in_place(folder, output, (*replaced, *BESIDE))


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """No other process is in here with the same directory; the system ends the lock of one that is killed."""
    directory = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--output {shorten_path(output)}: another trtrun writes there now: wait for it, or name another one"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
                raise
            # A network file system that locks no directories.
        yield
    finally:
        os.close(directory)


def _put_in_place(folder: Path, output: Path, replaced: Sequence[str]) -> None:
    """Without config.json nothing is a model, so it goes first and comes last."""
    for pattern in (_CONFIG, *replaced):
        for file in output.glob(pattern):
            if file.is_symlink() or not file.is_dir():
                file.unlink()
    files = [file for file in folder.iterdir() if file.name != MARKER]
    for file in sorted(files, key=lambda one: one.name == _CONFIG):
        os.replace(file, output / file.name)
    _remove(folder)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for file in sorted(folder.iterdir(), key=lambda one: one.name == MARKER):
            file.unlink()
        folder.rmdir()
