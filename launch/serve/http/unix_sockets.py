"""Sockets that are files, which their owner alone can open: where they lie, how they are made, taken over and removed.

It does not know what is said over them. A file on a disk that several hosts share has a server on one of them alone:
from the others it looks like that of a dead server.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.jobs.placement.allocation import find_job
from trtrun.errors import ConfigError, shorten_path

LONGEST_PATH = 107
"""Bytes of a socket's path that the kernel takes."""

GRPC_SUFFIX = ".grpc"
"""Follows the path of a server's socket in that of its gRPC."""

BACKLOG = 2048
"""Connections that wait to be accepted."""

KEY = "server.uds"
AUTO = Path("auto")
_ANSWER_SECONDS = 5.0


def find_place(given: Path, environment: Mapping[str, str]) -> Path:
    """The absolute path of a server's socket.

    Args:
        given: the value of `server.uds`.
        environment: of this process.

    Raises:
        ConfigError: a variable in it is not set, or the kernel does not take a path as long as that of its gRPC.
    """
    place = _own_place(environment) if given == AUTO else _expand(given, environment)
    length = len(os.fsencode(place)) + len(GRPC_SUFFIX)
    if length > LONGEST_PATH:
        raise ConfigError(
            f"{KEY}: {shorten_path(place)} has {length} bytes with {GRPC_SUFFIX} behind it, and sockets' paths may "
            f"have {LONGEST_PATH}: name a shorter one"
        )
    return place


def _expand(given: Path, environment: Mapping[str, str]) -> Path:
    """The path with the variables of the environment in it, and `~`."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in environment:
            raise ConfigError(f"{KEY}: {given} names ${name}, which is not set")
        return environment[name]

    named = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, str(given))
    try:
        return Path(os.path.abspath(Path(named).expanduser()))
    except RuntimeError:
        raise ConfigError(f"{KEY}: {given}: there is no such user, or nobody knows its home") from None


def _own_place(environment: Mapping[str, str]) -> Path:
    """A path for this batch job, or this process, in a folder where nobody else can take its name."""
    job = find_job(environment)
    name = f"trtrun-{os.getpid() if job is None else job[1]}.sock"
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
        folder = Path(environment.get(variable) or ".")
        if folder.is_absolute() and _is_own(folder):
            return folder / name
    folder = Path("/tmp", f"trtrun-{os.geteuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        raise ConfigError(f"{KEY}: {folder} is no folder that this user alone writes to: set $TMPDIR to one, or a path")
    return folder / name


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's that no other one may write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def listen(path: Path) -> socket.socket:
    """Listen on a new file, which nobody but this user can open.

    Raises:
        ConfigError: something else is there, a server answers there, or it cannot be made.
    """
    clear(path)
    opened = socket.socket(socket.AF_UNIX)
    try:
        with for_this_user():
            opened.bind(str(path))
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise ConfigError(f"{KEY}: cannot listen at {path}: {describe_failure(path, error)}") from None
    opened.setblocking(False)
    return opened


@contextmanager
def for_this_user() -> Iterator[None]:
    """While this lasts, files of this process are made for its user alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def describe_failure(path: Path, error: OSError) -> str:
    """Why no socket could be made."""
    return f"there is no folder {path.parent}: make it" if not path.parent.is_dir() else str(error.strerror or error)


def clear(path: Path) -> None:
    """Remove the socket of a server that is dead.

    Raises:
        ConfigError: a server answers there, it is another user's, or no socket.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{KEY}: {path} is there, and is no socket: name another path")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_ANSWER_SECONDS)
            asking.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        try:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot remove {path} of a dead server: {error.strerror}") from None
        return
    except TimeoutError:
        pass  # it is there, and busy
    except OSError as error:
        raise ConfigError(f"{KEY}: cannot tell whether a server answers at {path}: {error.strerror}") from None
    raise ConfigError(f"{KEY}: a server answers at {path}: end it, or name another path")
