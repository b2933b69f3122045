"""Rank 0 and its workers, for tests of the heartbeat over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallel.topology import Topology
from parallel.watchdog.activity import Activity
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.heartbeat import Names
from parallel.watchdog.heartbeat_server import HeartbeatServer

TOPOLOGY = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
LONG = 600.0
SOON = 30.0
NAMES = Names("draft rank 1 (cpu:0)", "orchestrator rank 0 (host)")


@contextmanager
def serving() -> Iterator[HeartbeatServer]:
    """Rank 0's side, of a job of four ranks."""
    server = HeartbeatServer(TOPOLOGY, Activity(), LONG, LONG, "late")
    yield server
    server.close()


def refused(connection: socket.socket) -> bool:
    """Whether the other side closes the connection."""
    connection.settimeout(SOON)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def served(workers: WorkerConnections, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not until():
        assert time.monotonic() < deadline
        workers.serve(0.02)
