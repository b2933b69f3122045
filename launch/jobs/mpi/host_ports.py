"""Keeps strangers from the ports of a job whose ranks are all on this host: mpirun's own, and those of the ranks.

MPI libraries listen on all interfaces, whatever interfaces they are told to use, and mpirun reads what comes there
before it looks who sent it: three bytes from anywhere make Open MPI 5 wait for more, and the job's output with it.
No flag of theirs changes that. So the parent of mpirun asks the kernel: a filter on each socket that a process of the
job listens with drops packets that did not come over the loopback device. Who of this host has connected to mpirun and
is another user, or came before the filter, is parted from it: mpirun waits for what a connection says, and all ranks
with it. Once every rank is there, nobody at all has to connect to mpirun any more.

Another process's sockets are reached as the kernel lets a parent do it (pidfd_getfd, Linux 5.6); where it does not,
ports stay as they are. It does not know what is said over them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launch.jobs.mpi.processes import session_processes, user_of_peer

LOOK_SECONDS = 0.5
"""Between two looks for new ports, while ranks start."""

LOOPBACK = 1
"""Number of the loopback device, in every network of Linux (include/net/flow.h)."""

_GONE = frozenset({errno.EBADF, errno.ESRCH, errno.ENOENT, errno.ENOTSOCK})
"""What the system says of a descriptor that is closed by now, or is another one; and of a process that has ended."""

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_LOAD_DEVICE = (0x20, 0, 0, 0xFFFFF008)  # linux/filter.h: BPF_LD | BPF_W | BPF_ABS of SKF_AD_OFF + SKF_AD_IFINDEX
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_TAKE, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)

logger = logging.getLogger(__name__)


class HostPorts:
    """The ports of the processes of one session. Used from one thread."""

    def __init__(self, session: int) -> None:
        """Begin to look.

        Args:
            session: of the job; its leader is mpirun.
        """
        self._session = session
        self._kept: set[str] = set()
        self._look_due = 0.0
        self._is_over = False
        self._refusal = ""

    def tend(self, all_are_there: bool) -> None:
        """Look for new ports, now and then. Cheap where there is nothing to do.

        Args:
            all_are_there: whether every rank has met the others: no more ports are opened, and nobody else connects.
        """
        now = time.monotonic()
        if self._is_over or (now < self._look_due and not all_are_there):
            return
        self._look_due = now + LOOK_SECONDS
        self._is_over = all_are_there
        for process in session_processes(self._session):
            connections: list[socket.socket] = []
            ports: set[int] = set()
            for name, found in self._sockets(process):
                if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it does not listen
                    connections.append(found)
                    continue
                with found as listening:
                    try:
                        ports.add(listening.getsockname()[1])
                        self._keep_strangers_out(name, listening, all_are_there and process == self._session)
                    except OSError as error:
                        self._refuse("filter them", error)
                    else:
                        self._kept.add(name)
            for connection in connections:
                with connection, suppress(OSError):  # it has ended by itself
                    if process == self._session and connection.getsockname()[1] in ports:
                        _part_from_stranger(connection)
        if self._is_over:
            told = f"; {self._refusal}: others stay open" if self._refusal else ""
            logger.info("%d ports of the job take no connections from other hosts%s", len(self._kept), told)

    def _keep_strangers_out(self, name: str, listening: socket.socket, and_others: bool) -> None:
        if and_others:
            drop_packets(listening)
            with suppress(OSError):  # so that lists of ports say so, too
                device = socket.if_indextoname(LOOPBACK).encode()
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
        elif name not in self._kept:  # ranks may inherit mpirun's own
            drop_packets(listening, but_from=LOOPBACK)

    def _refuse(self, what: str, error: OSError) -> None:
        self._refusal = self._refusal or f"the system does not let a parent {what} ({error.strerror})"

    def _sockets(self, process: int) -> Iterator[tuple[str, socket.socket]]:
        """The TCP sockets of a process, with their names in the system."""
        handle = -1
        try:
            handle = os.pidfd_open(process)
            entries = list(Path(f"/proc/{process}/fd").iterdir())
            for entry in entries:
                try:
                    name = os.readlink(entry)
                    found = _take_socket(handle, int(entry.name)) if name.startswith("socket:") else None
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    continue
                if found is not None and _is_tcp(found):
                    yield name, found
                elif found is not None:
                    found.close()
        except OSError as error:
            # One that has just ended is not this user's any more.
            if error.errno not in _GONE and process in session_processes(self._session):
                self._refuse("see them", error)
        finally:
            if handle >= 0:
                os.close(handle)


def drop_packets(listening: socket.socket, but_from: int | None = None) -> None:
    """Have a listening socket take no connections any more; those that there are go on.

    Args:
        listening: the socket.
        but_from: number of a device over which connections still come.
    """
    program = [_DROP]
    if but_from is not None:
        program = [_LOAD_DEVICE, (_JUMP_IF_EQUAL, 0, 1, but_from), _TAKE, _DROP]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    told = struct.pack("HP", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)


def _take_socket(handle: int, number: int) -> socket.socket:
    """Another process's socket, as a descriptor of this process's own.

    Raises:
        OSError: the system does not allow it, or the descriptor is closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    taken = libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if taken < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        return socket.socket(fileno=taken)
    except OSError:
        os.close(taken)
        raise


def _is_tcp(found: socket.socket) -> bool:
    return found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM


def _part_from_stranger(connection: socket.socket) -> None:
    """End a connection to mpirun that no process of this user has made on this host.

    Raises:
        OSError: it has ended.
    """
    if user_of_peer(connection) != os.geteuid():
        logger.info("a stranger's connection to mpirun is ended: %s", connection.getpeername()[0])
        connection.shutdown(socket.SHUT_RDWR)
