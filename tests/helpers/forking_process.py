"""The process that commands of tests, and their ranks, are forked from: it has imported what takes long, and waits.

    python forking_process.py COMMANDS RANKS ADDRESS [MODULE…]

COMMANDS and RANKS are descriptors: of its end of the socket by which commands are asked for
(forked_commands.py), and of the one that listens where ranks ask (forked_ranks.py), at ADDRESS; MODULEs
are imported beside TAKE_LONG. It knows no test.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked_ranks import can_be_forked, fork_ranks

from trtrun.errors import PlacementError

FAULT = "TRTRUN_TEST_FAULT"
FAULTS = Path(__file__).parents[1] / "e2e" / "cli" / "faults"
PARSER = "launch.serve.application.parser_worker"
MOST_BYTES = 1 << 17
"""Of a request: arguments and environment."""

TAKE_LONG = (
    "trtrun.api.llm", "launch.cli", "launch.serve.application.serve", "launch.serve.engine.keeper", "llvmlite.binding",
    "mpi4py", "numpy.random", "launch.batch.run", "launch.batch.checks", "launch.bench.bench",
    "launch.jobs.check.rank_check", "launch.jobs.plan.plan", "launch.jobs.slurm.section", "launch.jobs.pbs.section",
)  # fmt: skip
"""Modules that commands and their ranks import, with all that these import."""

TAKE_LONG_FOR = {"train-drafter": ("transformers.models.llama.modeling_llama", "matplotlib.figure")}
"""More of one command: they are imported when it is first asked for."""


class Forking:
    """Forks for each request, until nobody is left to ask.

    Args:
        connection: by which commands are asked for.
        listener: where ranks ask, each by a connection of its own; it is killed when that is closed.
        own: variables that this process was started with.
    """

    def __init__(self, connection: socket.socket, listener: socket.socket, own: dict[str, str]) -> None:
        self._connection = connection
        self._listener = listener
        self._own = own
        self._ranks: dict[socket.socket, int | None] = {}  # their processes' descriptors, once they are there
        self._running: dict[int, tuple[int, int]] = {}  # by their descriptors: processes, and where to tell their ends

    def wait_to_be_forked(self) -> dict[str, Any] | None:
        """The request in a process that is forked for it; None in this one, at the end."""
        while True:
            waited = [self._connection, self._listener, *self._ranks, *self._running]
            for ready in select.select(waited, [], [])[0]:
                if ready in self._running:
                    self._tell_end(ready)
                elif ready is self._listener:
                    self._ranks[self._listener.accept()[0]] = None
                elif ready is self._connection or (ready in self._ranks and self._ranks[ready] is None):
                    data, descriptors, _, _ = socket.recv_fds(ready, MOST_BYTES, 4)
                    if not data and ready is self._connection:
                        return None
                    request: dict[str, Any] = json.loads(data or "null")
                    if ready in self._ranks and not (request and can_be_forked(request["environment"], self._own)):
                        self._refuse(ready, descriptors)
                    elif self._fork(ready, descriptors, request["words"]):
                        return request
                elif ready in self._ranks:
                    self._kill(ready)

    def _fork(self, asking: socket.socket, descriptors: Sequence[int], words: Sequence[str]) -> bool:
        """Whether this is the new process, which is to do what these words say."""
        *streams, status = descriptors
        import_more(words)
        process = os.fork()
        if process == 0:
            for number, descriptor in enumerate(streams, start=3 - len(streams)):
                os.dup2(descriptor, number)
            for connection in (self._connection, self._listener, *self._ranks):
                connection.close()
            for descriptor in (*descriptors, *self._running, *(status for _, status in self._running.values())):
                os.close(descriptor)
            return True
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(process)
        self._running[descriptor] = process, status
        if asking in self._ranks:
            self._ranks[asking] = descriptor
        with suppress(BrokenPipeError, ConnectionResetError):  # a rank that has ended: that is seen next
            asking.send(str(process).encode())
        return False

    def _refuse(self, asking: socket.socket, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(BrokenPipeError, ConnectionResetError):
            asking.send(b"0")
        del self._ranks[asking]
        asking.close()

    def _kill(self, asking: socket.socket) -> None:
        """Who stood for a rank is gone; so is the rank behind this."""
        descriptor = self._ranks.pop(asking)
        asking.close()
        if descriptor in self._running:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)

    def _tell_end(self, descriptor: int) -> None:
        # A command that ends has seen the end of who stood for its ranks. Whoever hears of it may look for the ranks.
        standing = [asking for asking, of_rank in self._ranks.items() if of_rank not in (None, descriptor)]
        for asking in select.select(standing, [], [], 0)[0]:
            self._kill(asking)
        process, status = self._running.pop(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(BrokenPipeError):
            os.write(status, str(code).encode())
        os.close(status)
        for asking in [asking for asking, of_rank in self._ranks.items() if of_rank == descriptor]:
            del self._ranks[asking]
            asking.close()


def import_more(words: Sequence[str]) -> None:
    """What takes long of a command with these words alone, for all that come behind it."""
    for word in TAKE_LONG_FOR.keys() & set(words):
        for name in TAKE_LONG_FOR[word]:
            importlib.import_module(name)


def be_python(words: Sequence[str]) -> None:
    """Do what `python WORDS…` does, with a module or a file."""
    name, *rest = words
    if name == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [*words], str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def ask_beforehand() -> None:
    """What each rank or command asks of what does not change, and is told from then on without looking."""
    from launch.jobs.check.inventory import hash_sources
    from launch.jobs.mpi.library import choose_flavour
    from launch.jobs.mpi.mpirun import build_environment, find_mpirun

    hash_sources()
    with suppress(PlacementError):
        for environment in (os.environ, build_environment()):
            choice = choose_flavour("auto", environment)
        find_mpirun(choice.flavour, choice.library)


def read_variables_again() -> None:
    """A module that `import_more` may have imported has read variables then: they are to be this command's."""
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        importlib.reload(constants)


def begin_now() -> None:
    """A module of the command has read the clock when it was imported: it is to be this process's start."""
    for module in [module for name, module in sys.modules.items() if name.startswith("launch.")]:
        if hasattr(module, "STARTED"):
            module.STARTED = time.monotonic()


def misbehave() -> None:
    """Where this is the rank that is to: faults/sitecustomize.py is what a new Python would import by itself."""
    if FAULT in os.environ:
        runpy.run_path(str(FAULTS / "sitecustomize.py"))


def main() -> None:
    """Import what takes long of what commands import, fork, and be the command."""
    before = dict(os.environ)
    for name in (*TAKE_LONG, *sys.argv[4:]):
        importlib.import_module(name)
    assert "mpi4py.MPI" not in sys.modules, "it begins MPI"
    del sys.modules["launch.cli"], sys.modules["launch"].cli  # ranks have it run as their program
    # What the import has set (docs/python.md, "Variables of the environment") is set in every command, too.
    settings = {name: value for name, value in os.environ.items() if before.get(name) != value}
    ask_beforehand()
    gc.freeze()  # else the first collection of each command copies all of torch's objects
    commands, ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with socket.socket(fileno=commands) as connection, socket.socket(fileno=ranks) as listener:
        request = Forking(connection, listener, before).wait_to_be_forked()
        if request is None:
            return
    os.environ.clear()
    os.environ.update({**settings, **request["environment"]})
    os.chdir(request["folder"])
    if request["new_session"]:
        os.setsid()
    program, *words = request["words"]
    read_variables_again()
    begin_now()
    misbehave()
    if request.get("ranks"):
        fork_ranks(address)
    if PARSER in words:
        words[-1] = str(os.getppid())  # it ends at once where its parent is another one
    if program != "trtrun":
        be_python(words)
        return
    sys.argv = request["words"]
    from launch import cli

    cli.main()


if __name__ == "__main__":
    main()
