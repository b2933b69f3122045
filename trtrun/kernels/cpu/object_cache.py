"""Compiled kernels on disk, so that the ranks of later jobs need not compile them: half a second each.

They lie in the user's folder of caches ($XDG_CACHE_HOME, by default ~/.cache), in `trtrun/kernels`; and an image has
some in `share/trtrun/kernels` of its Python environment. What is read is run, so nothing is read from a folder or a
file that another user may write, but root. Where there is no such folder, every process compiles for itself. It does
not know what is compiled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MOST_FILES = 64
"""Files that are kept; each has 10 to 200 KB. Those that were written first go first."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Where objects lie; None where the environment names no folder for them."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the XDG Base Directory Specification has it
        base = os.path.expanduser("~/.cache")
    return Path(base, "trtrun", "kernels") if os.path.isabs(base) else None


def read_object(key: str) -> bytes | None:
    """What was written for a key; None where nothing was, or it is not whole, or neither this user's own nor root's.

    Args:
        key: letters and digits.
    """
    folders = (cache_folder(), Path(sys.prefix, "share", "trtrun", "kernels"))
    return next((found for folder in folders if folder is not None and (found := _read_from(folder, key))), None)


def _read_from(folder: Path, key: str) -> bytes | None:
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(f"{key}.o", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
            with open(file, "rb") as opened:
                if not (_is_own(directory) and _is_own(file)):
                    return None
                content = opened.read()
        finally:
            os.close(directory)
    except OSError:
        return None
    digest, compiled = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return compiled if hashlib.sha256(compiled).digest() == digest else None


def write_object(key: str, compiled: bytes) -> None:
    """Keep what was compiled for a key. Does nothing where it cannot be kept."""
    folder = cache_folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".new")  # ranks write at the same time; one of them is last
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(compiled).digest() + compiled)
            os.replace(name, folder / f"{key}.o")
        except OSError:
            os.unlink(name)
            raise
        written = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime_ns)
        for path in written[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _is_own(descriptor: int) -> bool:
    """Whether an open file or folder is this user's or root's, and nobody else may write it."""
    status = os.fstat(descriptor)
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _WRITABLE_BY_OTHERS
