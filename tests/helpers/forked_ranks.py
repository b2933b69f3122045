"""Ranks and engines that are forked from a process that has imported torch, where a command would start new programs.

As a program, `forked_ranks.py ADDRESS PYTHON WORD…` is what mpirun, or the front of a server, starts in the
place of `PYTHON WORD…`. It has the process at that address (forking_process.py) fork it, with its own
environment, folder and standard streams, and stands for it: signals go on, killed it takes the other along, and it ends
as the other does. Where that process says no, it becomes the program itself.

Tests of what the kernel does to ranks and engines whose parents die start new programs. Each process reads this file:
it imports little.
"""

from __future__ import annotations

import os
import signal
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PROGRAM = ("-m", "mpi4py")
"""Words behind Python's own with which a rank starts."""

LOADED_WITH = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONWARNINGS")
"""Variables that are read when a program starts, or loads libraries: a rank with others is not forked."""

OWN_LIBRARIES = os.path.realpath(f"{sys.prefix}/lib")
"""Which Open MPI's mpirun adds to where libraries are looked for; those of this Python are found without."""

NAME = "for "
"""Begins the name, as the kernel has it, of what stands for another process; that one's number follows."""

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl(2)
INHERITED = "PMI_FD"
"""Names an open file by which MPICH's ranks talk to their mpirun; a forked one has no such file."""


def standing_for(address: str, command: list[str]) -> list[str]:
    """The words of mpirun whose ranks this program stands for."""
    size, words = 1 + len(PROGRAM), list[str]()
    for place, word in enumerate(command):  # a command for several hosts holds the program once for each
        if tuple(command[place : place + size]) == (sys.executable, *PROGRAM):
            words += stand_in(address)
        words.append(word)
    return words


def stand_in(address: str) -> list[str]:
    """This program, before the words of what it stands for."""
    return [sys.executable, "-I", "-S", __file__, address]


def bound_at(address: str) -> str:
    """The socket of an address: a file, which processes of other network namespaces find, or a name of this one's."""
    return address if address.startswith("/") else "\0" + address


def fork_ranks(address: str) -> None:
    """Ranks that this process's mpirun starts, engines of this front, and what reads its requests, are forked by the
    process at an address."""
    from launch.jobs.mpi import supervise
    from launch.serve.engine import keeper
    from launch.serve.parsing import worker_pool

    ending_with_parent = supervise.ending_with_parent
    supervise.ending_with_parent = lambda command: ending_with_parent(standing_for(address, list(command)))
    keeper.ending_with_parent = lambda command: ending_with_parent([*stand_in(address), *command])
    worker_pool.PROGRAM = (*stand_in(address), *worker_pool.PROGRAM)


def can_be_forked(environment: dict[str, str], own: dict[str, str]) -> bool:
    """Whether a rank of one environment is the same when a process that started with another one forks it."""
    return INHERITED not in environment and all(
        _words(environment.get(name)) == _words(own.get(name)) for name in LOADED_WITH
    )


def _words(value: str | None) -> list[str]:
    """The words of a variable, such as the folders of a path."""
    words = dict.fromkeys(filter(None, (value or "").split(os.pathsep)))
    return [word for word in words if os.path.realpath(word) != OWN_LIBRARIES]


def main() -> None:
    """Stand for a rank."""
    import ctypes
    import json
    import socket

    address, *words = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known whom they go on to: it may run already
    status, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(bound_at(address))
        request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
        request |= {"new_session": True, "ranks": True}  # an engine has ranks
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2, writer])
        os.close(writer)
        rank = int(connection.recv(100))
        if not rank:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            os.execv(words[0], words)
        library = ctypes.CDLL(None)
        library.prctl(PR_SET_NAME, f"{NAME}{rank}".encode())
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with mpirun, as a rank
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(rank, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for stream in (0, 1, 2):
            os.close(stream)  # they are the rank's
        code = int(os.read(status, 100))
        if code < 0:
            if -code in FORWARDED:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


if __name__ == "__main__":
    main()
