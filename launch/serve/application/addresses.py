"""Where a server listens: opened before anything else is begun, announced in one place once the engine is there.

Ports of an address, or files that only this user can open. It does not know what is answered there.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from urllib.parse import quote

from launch.jobs.batch.reach import describe_way, tell_way
from launch.jobs.mpi.drain import end_at_once, end_signals
from launch.serve.http import unix_sockets
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError


@dataclass
class Listener:
    """A socket that is listened on before anything else is begun, so that a port that is taken is told at once.

    Attributes:
        port: that it has got; 0 of a file.
    """

    socket: socket.socket
    port: int


def listen(host: str, port: int, key: str) -> Listener:
    """Listen on an address.

    Args:
        host: name or address.
        port: 0 takes a free one.
        key: of the configuration, that names the port.

    Raises:
        ConfigError: it cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.create_server(found[4][:2], family=found[0], backlog=unix_sockets.BACKLOG)
    except UnicodeError:
        raise ConfigError(f"server.host: '{host}' is no name of a host") from None
    except OSError as error:
        # A name that is not found has a number of its own; to the others Python adds the address once more.
        number = None if isinstance(error, socket.gaierror) else error.errno
        reason = error.strerror if number is None else os.strerror(number)
        if number == errno.EADDRINUSE:
            reason = f"{reason}; 0 takes a free one"
        raise ConfigError(f"server.host, {key}: cannot listen on {host} port {port}: {reason}") from None
    opened.setblocking(False)
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, and without it the second part
    # of an answer waits 40 ms for the client to acknowledge the first.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Listener(opened, opened.getsockname()[1])


@dataclass
class Addresses:
    """The addresses of one server; a context whose end removes its files.

    Attributes:
        section: of the configuration.
        http: of the APIs.
        metrics: of a port for these alone; None where they are at the APIs' address alone.
        path: of the APIs' socket; None where they have a port.
    """

    section: ServerSection
    http: Listener
    metrics: Listener | None = None
    path: Path | None = None
    _made: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def open(cls, section: ServerSection, environment: Mapping[str, str]) -> Addresses:
        """Listen for HTTP.

        Args:
            section: says where.
            environment: of this process.

        Raises:
            ConfigError: it cannot listen there.
        """
        if section.uds is None:
            http = listen(section.host, section.http_port, "server.http_port")
            return cls(section, http, listen(section.host, section.metrics_port, "server.metrics_port"))
        path = unix_sockets.find_place(section.uds, environment)
        opened = cls(section, Listener(unix_sockets.listen(path), 0), path=path)
        opened.note_file(path)
        return opened

    @property
    def grpc_path(self) -> Path | None:
        """Where the socket of gRPC is; None where it has a port."""
        return None if self.path is None else self.path.with_name(self.path.name + unix_sockets.GRPC_SUFFIX)

    @property
    def are_open(self) -> bool:
        """Whether other hosts reach them."""
        if self.path is not None:
            return False
        return not ipaddress.ip_address(self.http.socket.getsockname()[0].partition("%")[0]).is_loopback

    @property
    def url(self) -> str:
        """Where this host finds the APIs."""
        return self._url(self.http) if self.path is None else f"unix://{quote(str(self.path))}"

    def describe(self, model_name: str, grpc_port: int, environment: Mapping[str, str]) -> Iterator[str]:
        """The lines that announce the server, which programs read: `launch/jobs/batch/reach.py` and others.

        Args:
            model_name: what clients call the model.
            grpc_port: of gRPC, where it has a port.
            environment: of this process.
        """
        metrics, grpc = "/metrics", f"unix:{quote(str(self.grpc_path))}"
        if self.path is None:
            assert self.metrics is not None
            metrics, grpc = f"{self._url(self.metrics)}/metrics", f"{self._host}:{grpc_port}"
        yield f"{model_name} is served at {self.url}, metrics at {metrics}, gRPC at {grpc}"
        way = describe_way(self.url, not self.are_open, environment)
        if way is not None:
            yield tell_way(way)

    def _url(self, listener: Listener) -> str:
        scheme = "http" if self.section.tls_cert is None else "https"
        return f"{scheme}://{self._host}:{listener.port}"

    @property
    def _host(self) -> str:
        return f"[{self.section.host}]" if ":" in self.section.host else self.section.host

    def note_file(self, path: Path) -> None:
        """Remember that a file is this server's."""
        found = path.lstat()
        self._made[path] = (found.st_dev, found.st_ino)

    def remove_files(self) -> None:
        """Remove the files of this server, and none that another one has put in their place. Called while it still
        listens, for until then no other one takes them."""
        while self._made:
            path, made = self._made.popitem()
            with suppress(OSError):
                found = path.lstat()
                if (found.st_dev, found.st_ino) == made:
                    path.unlink()

    def __enter__(self) -> Addresses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove_files()


@contextmanager
def ended_without_files(addresses: Addresses) -> Iterator[None]:
    """Until the server hears signals itself: those that would end the process leave no file of it behind."""

    def end(number: int, frame: FrameType | None) -> None:
        addresses.remove_files()
        end_at_once(number)

    ending = [number for number in end_signals() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
