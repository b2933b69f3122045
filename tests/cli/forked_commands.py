"""`trtrun`, and other programs of Python, in a process of its own, forked from one that has imported torch for all.

Importing torch takes longer than most commands do. Each command has its own arguments, environment, folder and pipes,
and its own end, as if a shell had started it; ranks that it starts are new programs, as ever. What depends on how
Python itself starts (PYTHONPATH, what is imported when) is not seen here: tests of that start the real program.

As a program, `forked_commands.py DESCRIPTOR` is the process that forks; the descriptor is its end of a socket.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 17
"""Of a request: arguments and environment."""


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


def fork_by(connection: socket.socket, outputs: Sequence[int], **request: Any) -> tuple[int, int]:
    """Have the process at the other end fork; returns the new one's id, and where its exit status will be told.

    Args:
        connection: to that process.
        outputs: descriptors that become its standard output and error; they stay open here.
        request: `words`, `environment`, `folder` and `new_session` as `main` has them.
    """
    status, writer = os.pipe()
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
            words=words, environment=dict(env), folder=str(cwd), new_session=start_new_session,
        )  # fmt: skip
        return ForkedProcess(process, status, (), words)


class ForkedCommands:
    """Starts commands.

    Attributes:
        descriptor: of the socket by which they are asked for.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
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
    ) -> ForkedProcess:
        """Start `trtrun`, or a program of Python, with these arguments."""
        words = [*(program or ["trtrun"]), *arguments]
        outputs, errors = os.pipe(), os.pipe()
        writers = [pipe[1] for pipe in (outputs, errors)]
        process, status = fork_by(
            self._socket, writers, words=words, environment=environment, folder=str(folder), new_session=False
        )
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
        """As `start`, to its end; what it says is captured, as by `subprocess.run`.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds, and was killed.
        """
        process = self.start(arguments, environment, folder, program)
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
        self._process.wait(timeout=60)


def wait_to_be_forked(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and tell its process, and its exit status at its end; returns the request in the new one.

    Returns None once nobody is left to ask.
    """
    running: dict[int, tuple[int, int]] = {}  # by their descriptors: processes, and where to tell their ends
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for ended in ready:
            if ended is not connection:
                process, status = running.pop(ended)
                os.close(ended)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(status, str(code).encode())
                os.close(status)
        if connection not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not data:
            return None
        process = os.fork()
        if process == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors[:2], start=1):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, *running, *(status for _, status in running.values())):
                os.close(descriptor)
            request: dict[str, Any] = json.loads(data)
            return request
        *outputs, status = descriptors
        for output in outputs:
            os.close(output)
        running[os.pidfd_open(process)] = process, status
        connection.send(str(process).encode())


def be_python(words: Sequence[str]) -> None:
    """Do what `python WORDS…` does, with a module or a file."""
    name, *rest = words
    if name == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [*words], str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def main() -> None:
    """Import what takes long of what commands import, fork, and be the command."""
    before = dict(os.environ)
    from trtrun.api import llm

    assert llm.__name__ in sys.modules and "mpi4py.MPI" not in sys.modules
    # The rooms of `launch` are each command's own: one of them reads the clock when it is imported.
    assert not any(name.partition(".")[0] == "launch" for name in sys.modules)
    # What the import has set (docs/python.md, "Variables of the environment") is set in every command, too.
    settings = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # else the first collection of each command copies all of torch's objects
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = wait_to_be_forked(connection)
        if request is None:
            return
    os.environ.clear()
    os.environ.update({**settings, **request["environment"]})
    os.chdir(request["folder"])
    if request["new_session"]:
        os.setsid()
    program, *words = request["words"]
    if program != "trtrun":
        be_python(words)
        return
    sys.argv = request["words"]
    from launch import cli

    cli.main()


if __name__ == "__main__":
    main()
