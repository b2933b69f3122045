"""The file that says where the server of a name listens, and the one beside it, for the server that follows.

Both are replaced whole, so that whoever reads one reads an old or a new one. All may read the first. The second has
the token of the door at which the follower knocks, and only its owner reads it. It does not know what is done there.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from trtrun.errors import ConfigError, shorten_path

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
    """

    hosts: tuple[str, ...]
    port: int
    token: str


def describe_server(
    model: str, url: str, way: str | None, is_loopback: bool, environment: Mapping[str, str]
) -> ServedName:
    """What the file says of the server in this process.

    Args:
        model: that it serves.
        url: that it listens at.
        way: as of `launch.jobs.slurm.reach.describe_way`.
        is_loopback: whether only this host reaches it.
        environment: of this process.
    """
    host, address = socket.gethostname(), urlsplit(url)
    if not is_loopback:
        url = way or f"{address.scheme}://{host}:{address.port}"
    return ServedName(
        url=url,
        host=environment.get("SLURMD_NODENAME") or host,
        model=model,
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        job=environment.get("SLURM_JOB_ID"),
        reach=way if is_loopback else None,
    )


Kind = TypeVar("Kind", ServedName, DoorAddress)


class NameFile:
    """The two files of one name."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet; `path` is of the file for clients."""
        self.path = path
        self._door = path.with_name(f".{path.name}.door")

    def check(self) -> None:
        """Raise ConfigError where the files cannot be written."""
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"server.name_file: {shorten_path(self.path.parent)} is no directory to write to")

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
        _replace(self._door, msgspec.json.encode(door), 0o600)
        _replace(self.path, msgspec.json.format(msgspec.json.encode(name)) + b"\n", 0o644)

    def leave(self, name: ServedName, door: DoorAddress) -> None:
        """Remove the files of a server that ends, unless another one has taken the name."""
        with suppress(OSError):
            if self.read_name() == name:
                self.path.unlink()
            if self.read_door() == door:
                self._door.unlink()


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file beside it, and rename that."""
    beside = path.with_name(f".{path.name.removeprefix('.')}.{secrets.token_hex(8)}")
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
