"""`trtrun` in a process of its own, forked from one that has imported torch once for all of them.

Importing torch takes longer than most commands do. Each command has its own arguments, environment, folder and pipes,
and its own end, as if a shell had started it; ranks that it starts are new programs, as ever. What depends on how
Python itself starts (PYTHONPATH, what is imported when) is not seen here: tests of that start the real program.

As a program, `forked_commands.py DESCRIPTOR` is the process that forks; the descriptor is its end of a socket.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 17
"""Of a request: arguments and environment."""


class ForkedCommands:
    """Starts commands, one at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def run(
        self, arguments: Sequence[str], environment: dict[str, str], folder: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `trtrun` with these arguments; what it says is captured, as by `subprocess.run`.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds, and was killed.
        """
        request = {"arguments": list(arguments), "environment": environment, "folder": str(folder)}
        pipes = os.pipe(), os.pipe()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [writer for _, writer in pipes])
        for _, writer in pipes:
            os.close(writer)
        process = int(self._answer())
        try:
            output, errors = _read_all([reader for reader, _ in pipes], time.monotonic() + timeout)
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            self._answer()
            raise subprocess.TimeoutExpired(["trtrun", *arguments], timeout) from None
        return subprocess.CompletedProcess(["trtrun", *arguments], int(self._answer()), output, errors)

    def _answer(self) -> bytes:
        answer = self._socket.recv(100)
        assert answer, "the process that forks commands has ended"
        return answer

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._process.wait(timeout=60)


def _read_all(readers: list[int], deadline: float) -> list[str]:
    """All that comes out of pipes, which are closed then.

    Raises:
        TimeoutError: they have not come to their ends by the deadline.
    """
    found: dict[int, list[bytes]] = {reader: [] for reader in readers}
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    found[key.fd].append(data)
                    if not data:
                        selector.unregister(key.fd)
        finally:
            for reader in readers:
                os.close(reader)
    # As subprocess reads texts.
    return [b"".join(parts).decode().replace("\r\n", "\n").replace("\r", "\n") for parts in found.values()]


def wait_to_be_forked(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and tell its process and its exit status; returns the request in the new process.

    Returns None once nobody is left to ask.
    """
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not data:
            return None
        process = os.fork()
        if process == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            request: dict[str, Any] = json.loads(data)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(process).encode())
        _, status = os.waitpid(process, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def main() -> None:
    """Import what takes long of what commands import, fork, and be the command."""
    before = dict(os.environ)
    from trtrun import llm

    assert llm.__name__ in sys.modules and "mpi4py.MPI" not in sys.modules
    # The rooms of `launch` are each command's own: one of them reads the clock when it is imported.
    assert not any(name.partition(".")[0] == "launch" for name in sys.modules)
    # What the import has set (docs/architecture.md, "What importing changes") is set in every command, too.
    settings = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # else the first collection of each command copies all of torch's objects
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = wait_to_be_forked(connection)
        if request is None:
            return
    os.environ.clear()
    os.environ.update({**settings, **request["environment"]})
    os.chdir(request["folder"])
    sys.argv = ["trtrun", *request["arguments"]]
    from launch import cli

    cli.main()


if __name__ == "__main__":
    main()
