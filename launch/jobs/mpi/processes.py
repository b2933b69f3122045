"""Processes of this host: ending with the parent, the end of all that a child has started, and whose the other end of a
connection is, as the kernel's tables say.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1

_PROGRAM = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks, makes sure that the parent did not die before, and becomes the command."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have this process end, by a signal, with the one that started it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The words of a child of this process that runs a command and ends with this process.

    The child asks for that itself, in a Python that starts in some hundredths of a second: code that runs between fork
    and exec (`preexec_fn`) may hang in a process of several threads.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]


CLEAR_SECONDS = 5.0
"""How long processes may take to be gone once they are killed."""


def session_processes(session: int) -> Iterator[int]:
    """Every living process of a session: mpirun gives each rank a process group of its own, but the same session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # pid (name) state parent group session …; the name may hold spaces and parentheses.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            yield int(entry.name)


def kill_session(session: int) -> bool:
    """Kill every process of a session.

    Returns:
        Whether there was one.
    """
    found = False
    for process in session_processes(session):
        found = True
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    return found


def clear_session(session: int) -> None:
    """Kill every process of a session and see them gone: whoever starts the job again needs what they hold."""
    deadline = time.monotonic() + CLEAR_SECONDS
    while kill_session(session) and time.monotonic() < deadline:
        time.sleep(0.01)


Address = tuple[str, int]

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def user_of_peer(connection: socket.socket) -> int | None:
    """The user id of the socket that a TCP connection leads to; None where that is on another host or in another
    network of this one, or gone by now.

    Raises:
        OSError: nothing is connected any more.
    """
    wanted = _plain(connection.getpeername()), _plain(connection.getsockname())
    for local, remote, user in _entries():
        if (local, remote) == wanted:
            return user
    return None


def _entries() -> Iterator[tuple[Address, Address, int]]:
    """Local address, remote address and user of every TCP socket of this network (proc_net_tcp, in the kernel's
    documentation)."""
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield _read(fields[1]), _read(fields[2]), int(fields[7])


def _read(told: str) -> Address:
    """An address as the tables have it: words of four bytes in the processor's order, and the port."""
    host, _, port = told.partition(":")
    data = bytes.fromhex(host)
    if sys.byteorder == "little":
        data = b"".join(data[place : place + 4][::-1] for place in range(0, len(data), 4))
    return _plain((str(ipaddress.ip_address(data)), int(port, 16)))


def _plain(address: tuple[str, int, int, int] | Address) -> Address:
    """Host and port; an IPv4 address that is written as an IPv6 one is the former."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), address[1]
