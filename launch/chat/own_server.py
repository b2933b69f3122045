"""A server for one conversation: `trtrun serve` on a socket that nobody else can open.

It runs in a session of its own, so that a Ctrl-C in the terminal stops an answer and not the server, and ends with the
process that started it. It knows processes. It does not know what is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from launch.chat.client import ChatClient
from launch.jobs.mpi.mpirun import TERMINAL_VARIABLE
from launch.jobs.mpi.processes import ending_with_parent

END_SECONDS = 20.0
"""That the server has to end by itself."""

_ADDRESS = re.compile(r"is served at (unix:\S+), metrics at ")
_LONGEST_FOLDER = 60
"""Bytes, so that the path of a socket below is one that the kernel takes."""


@contextmanager
def own_server(words: Sequence[str]) -> Iterator[ChatClient]:
    """Start a server, and end it with the block.

    Args:
        words: arguments of `trtrun serve` that say what is served.

    Yields:
        Who asks it, once it is there. What it says meanwhile, and later, goes to standard error.

    Raises:
        click.exceptions.Exit: it ended before; it has said why, and the status is its own.
    """
    with tempfile.TemporaryDirectory(prefix="trtrun-chat-", dir=_short_folder()) as folder:
        own = ["--uds", str(Path(folder, "socket")), "--set", "server.name_file=null"]
        command = [sys.executable, "-m", "launch.cli", "serve", *words, *own]
        environment = dict(os.environ)
        if sys.stderr.isatty():  # its own is a pipe
            environment[TERMINAL_VARIABLE] = str(shutil.get_terminal_size().columns)
        process = subprocess.Popen(
            ending_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        told = _Told(process)
        try:
            url = told.wait_for_address()
            if url is None:
                raise click.exceptions.Exit(process.wait())
            yield ChatClient(url)
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            told.end()


def _short_folder() -> str | None:
    """Where temporary files lie, None for the usual place."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER else None


class _Told:
    """What a server says on its standard error: handed on, but for the line with its address."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._pipe = process.stderr
        self._url: str | None = None
        self._is_known = threading.Event()
        self._thread = threading.Thread(target=self._read, name="server's words", daemon=True)
        self._thread.start()

    def wait_for_address(self) -> str | None:
        """The server's address, once it serves; None where it has ended."""
        self._is_known.wait()
        return self._url

    def end(self) -> None:
        """The server has ended: take in the rest."""
        self._thread.join()
        self._pipe.close()

    def _read(self) -> None:
        held = b""
        while chunk := os.read(self._pipe.fileno(), 1 << 16):
            # A bar has no line ends: it is handed on as it comes, a line once it is whole.
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                found = _ADDRESS.search(line.decode(errors="replace"))
                if found is None:
                    self._hand_on(line + b"\n")
                elif self._url is None:
                    self._url = found[1]
                    self._is_known.set()
            if b"\r" in held:
                self._hand_on(held)
                held = b""
        self._hand_on(held)
        self._is_known.set()

    @staticmethod
    def _hand_on(text: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()
