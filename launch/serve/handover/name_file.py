"""The file that says where the server of a name listens, and the one beside it, for the server that follows.

Both are replaced whole, so that whoever reads one reads an old or a new one. All may read the first. The second has
the token of the door at which the follower knocks, and only its owner reads it. It does not know what is done there.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from launch.jobs.placement.allocation import find_job
from trtrun.errors import ConfigError, shorten_path

KEY = "server.name_file"
MOST_BYTES = 1 << 16
"""Of such a file: more is no such file."""


class ServedName(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, for clients.

    Attributes:
        url: as its own host sees it, or all hosts where it listens to them.
        host: that it runs on.
        model: that it serves.
        since: when it took the name, in ISO 8601.
        job: number of its Slurm job; None outside one.
        reach: what to do to reach it from another machine; None outside a Slurm job.
    """

    url: str
    host: str
    model: str
    since: str
    job: str | None = None
    reach: str | None = None


class DoorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server waits for the one that follows it.

    Attributes:
        hosts: names of its host, the likeliest first.
        port: there.
        token: that who knocks must know.
        certificate: SHA-256 of the certificate there, in hexadecimal digits; None where nothing is encrypted.
    """

    hosts: tuple[str, ...]
    port: int
    token: str
    certificate: str | None = None


def describe_server(
    model: str, url: str, way: str | None, is_loopback: bool, environment: Mapping[str, str]
) -> ServedName:
    """What the file says of the server in this process.

    Args:
        model: that it serves.
        url: that it listens at.
        way: as of `launch.jobs.batch.reach.describe_way`.
        is_loopback: whether only this host reaches it.
        environment: of this process.
    """
    host, address, job = socket.gethostname(), urlsplit(url), find_job(environment)
    if not is_loopback:
        url = way or f"{address.scheme}://{host}:{address.port}"
    return ServedName(
        url=url,
        host=environment.get("SLURMD_NODENAME") or host,
        model=model,
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        job=None if job is None else job[1],
        reach=way if is_loopback else None,
    )


Kind = TypeVar("Kind", bound=msgspec.Struct)


class NameFile:
    """The two files of one name."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet; `path` is of the file for clients."""
        self.path = path
        self._door = path.parent / f".{path.name}.door"

    def check(self) -> None:
        """Raise ConfigError where the files cannot be written, or would be written over a file of another kind."""
        told = shorten_path(self.path)
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{KEY}: {shorten_path(self.path.parent)} is no directory to write to")
        try:
            is_filled = self.path.exists() and (self.path.is_dir() or self.path.stat().st_size > 0)
            if is_filled and self.read_name() is None:
                raise ConfigError(f"{KEY}: {told} is there, and is none that a server has written: name another file")
            _write(self.path, b"", 0o600, lambda beside, path: None)
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot write {told}: {error.strerror}") from None

    def read_name(self) -> ServedName | None:
        """Where the server listens; None where no file says so."""
        return _read(self.path, ServedName)

    def read_door(self) -> DoorAddress | None:
        """Where the server before is; None where no file says so."""
        return _read(self._door, DoorAddress)

    def take(self, name: ServedName, door: DoorAddress) -> None:
        """Say from now on that this server is the one.

        Raises:
            OSError: the files cannot be written.
        """
        self._write(name, door, os.replace)

    def _write(self, name: ServedName, door: DoorAddress, put: Callable[[Path, Path], None]) -> None:
        _write(self._door, msgspec.json.encode(door), 0o600, put)
        _write(self.path, msgspec.json.format(msgspec.json.encode(name)) + b"\n", 0o644, put)

    def take_back(self, url: str, name: ServedName, door: DoorAddress) -> None:
        """Take the name from a server that is gone, known by its URL, unless yet another one has it."""
        lost, lost_door = self.read_name(), self.read_door()
        if lost is not None and lost.url != url:
            return
        with suppress(OSError):  # such as where a newer server has written its own meanwhile
            for path, theirs in ((self._door, lost_door), (self.path, lost)):
                if theirs is not None:
                    _remove(path, theirs)
            self._write(name, door, os.link)

    def leave(self, name: ServedName, door: DoorAddress) -> None:
        """Remove the files of a server that ends, unless another one has taken the name."""
        for path, own in ((self.path, name), (self._door, door)):
            with suppress(OSError):
                if _read(path, type(own)) == own:
                    _remove(path, own)


def _remove(path: Path, own: msgspec.Struct) -> None:
    """Remove a file, unless another server has written it meanwhile: nobody loses its name to one that ends."""
    beside = _path_beside(path)
    try:
        path.rename(beside)
    except FileNotFoundError:
        return
    if _read(beside, type(own)) != own:
        with suppress(FileExistsError):
            os.link(beside, path)
    beside.unlink()


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write(path: Path, content: bytes, mode: int, put: Callable[[Path, Path], None]) -> None:
    """Write a file beside it, and put that in its place: by renaming, or by a link where there is to be none yet."""
    beside = _path_beside(path)
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        put(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _path_beside(path: Path) -> Path:
    return path.parent / f".{path.name.removeprefix('.')}.{secrets.token_hex(8)}"
