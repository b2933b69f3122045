"""`trtrun`, and other programs of Python, in a process of its own, forked from one that has imported torch for all.

Importing torch takes longer than most commands do. Each command has its own arguments, environment, folder and pipes,
and its own end, as if a shell had started it; ranks that it starts are new programs, as ever, or forked too where that
is asked for (forked_ranks.py). What depends on how Python itself starts (PYTHONPATH, what is imported when) is not seen
here: tests of that start the real program.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from forked_ranks import NAME, bound_at, stand_in
from forking_process import MOST_BYTES

ROOT = Path(__file__).resolve().parents[1]
FORKING_PROCESS = Path(__file__).parent / "forking_process.py"


class ForkedProcess:
    """A command that runs: what tests use of `subprocess.Popen`, by the same names.

    Attributes:
        pid: of the process.
        stdout, stderr: what it says, as texts; None where it was given outputs.
        returncode: as Popen has it; None while it runs, or nobody has looked.
    """

    def __init__(self, pid: int, status: int, outputs: Sequence[int], words: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(words)
        self.returncode: int | None = None
        self.stdout, self.stderr = [open(output, encoding="utf-8") for output in outputs] or (None, None)  # noqa: SIM115
        self._status = status

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(os.read(self._status, MOST_BYTES))
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says from here on, to its end.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        found = {"stdout": "", "stderr": ""}
        errors: list[Exception] = []

        def read(name: str) -> None:
            if (stream := getattr(self, name)) is not None and not stream.closed:
                try:
                    with stream:
                        found[name] = stream.read()
                except Exception as error:  # such as bytes that are no text
                    errors.append(error)

        threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        return found["stdout"], found["stderr"]

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


_asking = threading.Lock()
"""Held from a request to its answer: threads of a test may ask at the same time."""


def fork_by(connection: socket.socket, outputs: Sequence[int], **request: Any) -> tuple[int, int]:
    """Have the process at the other end fork; returns the new one's id, and where its exit status will be told.

    Args:
        connection: to that process.
        outputs: descriptors that become its standard output and error; they stay open here.
        request: `words`, `environment`, `folder`, `new_session` and `ranks` as `forking_process.main` has them.
    """
    status, writer = os.pipe()
    with _asking:
        socket.send_fds(connection, [json.dumps(request).encode()], [*outputs, writer])
        os.close(writer)
        answer = connection.recv(100)
    assert answer, "the process that forks commands has ended"
    return int(answer), status


class ForkedPrograms:
    """What a module finds as `subprocess` whose programs of Python are to be forked.

    Args:
        descriptor: of the socket of a `ForkedCommands`, which nobody else uses meanwhile.
    """

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def Popen(
        self,
        words: Sequence[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        cwd: Path,
        start_new_session: bool,
    ) -> ForkedProcess:
        """Start `python WORDS…`; it reads nothing."""
        assert words[0] == sys.executable and stdin == self.DEVNULL
        process, status = fork_by(
            self._socket, [stdout.fileno(), stderr.fileno()],
            words=words, environment=dict(env), folder=str(cwd), new_session=start_new_session, ranks=True,
        )  # fmt: skip
        return ForkedProcess(process, status, (), words)


class ForkedCommands:
    """Starts commands.

    Args:
        environment: of the process that they are forked from.
        modules: that it imports, beside what commands import.
        before: words before those that start it, such as nsenter's.
        file: where ranks ask, as it sees the file, and as this process does; else a name is made up.

    Attributes:
        descriptor: of the socket by which they are asked for.
        address: where ranks and engines ask.
        process: that was started.
    """

    def __init__(
        self,
        environment: dict[str, str],
        modules: Sequence[str] = (),
        before: Sequence[str] = (),
        file: tuple[str, str] | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address, own_address = file or (f"trtrun-tests-{secrets.token_hex(8)}",) * 2
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(bound_at(own_address))
            listener.listen()
            descriptors = [theirs.fileno(), listener.fileno()]
            self.process = subprocess.Popen(
                [*before, sys.executable, str(FORKING_PROCESS), *map(str, descriptors), self.address, *modules],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self.descriptor = self._socket.fileno()

    def start(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        program: Sequence[str] | None = None,
        ranks: bool = False,
    ) -> ForkedProcess:
        """Start `trtrun`, or a program of Python, with these arguments; `ranks`: whether its ranks are forked, too."""
        words = [*(program or ["trtrun"]), *arguments]
        outputs, errors = os.pipe(), os.pipe()
        writers = [pipe[1] for pipe in (outputs, errors)]
        process, status = fork_by(
            self._socket, writers,
            words=words, environment=environment, folder=str(folder), new_session=False, ranks=ranks,
        )  # fmt: skip
        for writer in writers:
            os.close(writer)
        return ForkedProcess(process, status, (outputs[0], errors[0]), words)

    def run(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        timeout: float,
        program: Sequence[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As `start`, to its end, and its ranks are forked; what it says is captured, as by `subprocess.run`.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds, and was killed.
        """
        process = self.start(arguments, environment, folder, program, ranks=True)
        try:
            output, errors = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self.process.wait(timeout=60)


def running_processes() -> tuple[dict[int, list[int]], dict[int, int]]:
    """The child processes of each process that has any, and what other processes stand for (forked_ranks.py), which
    are their children, too. Zombies are left out."""
    children: dict[int, list[int]] = {}
    standing: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue
        process, (state, parent, *_) = int(entry.name), rest.split()
        if state != "Z":
            children.setdefault(int(parent), []).append(process)
            if name.startswith(NAME):
                standing[process] = int(name.removeprefix(NAME))
                children.setdefault(process, []).append(standing[process])
    return children, standing


def ranks_below(process: int) -> dict[int, int]:
    """Process ids of the MPI ranks that descend from `process`, by rank."""
    children, standing = running_processes()
    found: dict[int, int] = {}
    waiting = list(children.get(process, []))
    while waiting:
        child = waiting.pop()
        waiting += children.get(child, [])
        for item in _environment_of(child):
            name, _, value = item.partition("=")
            if name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
                found[int(value)] = standing.get(child, child)
    return found


def _environment_of(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def forked_words() -> list[str]:
    """Words before those of a program of Python that have the shared process fork it, whoever starts it: what ranks of
    a user's own mpirun are started by, or a shell's commands. In another environment it is a new program."""
    return stand_in(shared_commands().address)


@cache
def shared_commands() -> ForkedCommands:
    """All that this process's tests share; it ends with this process."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    commands = ForkedCommands({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    atexit.register(commands.close)
    return commands
