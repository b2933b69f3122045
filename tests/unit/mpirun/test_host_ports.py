"""Ports of a job on one host: real processes and sockets; the child that listens stands in for mpirun."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import lets_in

from launch.jobs.mpi import host_ports
from launch.jobs.mpi.host_folders import BYTES_A_RANK, has_room
from launch.jobs.mpi.host_ports import HostPorts
from launch.jobs.mpi.processes import user_of_peer

LISTENER = """
import socket, sys
listening = [socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0))]
print(*(opened.getsockname()[1] for opened in listening), flush=True)
there = [opened.accept()[0] for opened in listening]
while word := sys.stdin.readline():
    for connection in there:
        connection.sendall(word.encode())
    print("said", flush=True)
"""
SOON = 30.0


class Child:
    """A process that leads a session and listens: on all addresses and on the loopback one, with a connection each."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.ports = [int(word) for word in self.process.stdout.readline().split()]
        self.connections = [socket.create_connection(("127.0.0.1", port), timeout=SOON) for port in self.ports]

    def talk(self) -> None:
        """See that both connections go on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("word\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "said\n"
        assert [connection.recv(100) for connection in self.connections] == [b"word\n"] * 2

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.fixture(autouse=True)
def reaches_processes(child: Child) -> None:
    handle = os.pidfd_open(child.process.pid)
    try:
        host_ports._take_socket(handle, 0).close()
    except PermissionError as error:
        pytest.skip(f"this system does not hand out sockets of other processes: {error}")
    except OSError:
        pass  # its input is no socket
    finally:
        os.close(handle)


def test_while_ranks_start_this_host_connects_to_them(child: Child) -> None:
    ports = HostPorts(child.process.pid)
    ports.tend(all_are_there=False)
    assert [lets_in(port) for port in child.ports] == [True, True]
    child.talk()


def test_who_is_another_user_is_parted_from_mpirun(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from here by being another user than the one whose connections these are."""
    user = os.geteuid()
    ports = HostPorts(child.process.pid)
    child.talk()  # both are let in by now
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    ports.tend(all_are_there=False)
    assert [connection.recv(100) for connection in child.connections] == [b"", b""]


def test_whose_the_other_end_is() -> None:
    """An IPv4 connection to a port of both kinds is told by one address at one end and by another at the other."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        for host in ("127.0.0.1", "::1"):
            with (
                socket.create_connection((host, listening.getsockname()[1]), timeout=SOON) as client,
                listening.accept()[0] as accepted,
            ):
                assert user_of_peer(accepted) == user_of_peer(client) == os.geteuid()


def test_what_comes_over_another_device_is_not_heard(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from here by taking another device for the one of this host."""
    monkeypatch.setattr(host_ports, "LOOPBACK", 999)
    HostPorts(child.process.pid).tend(all_are_there=False)
    assert [lets_in(port) for port in child.ports] == [False, False]


def test_once_every_rank_is_there_nobody_connects_to_mpirun(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    ports = HostPorts(child.process.pid)
    with caplog.at_level(logging.INFO):
        ports.tend(all_are_there=True)
        ports.tend(all_are_there=True)
    assert [lets_in(port) for port in child.ports] == [False, False]
    child.talk()
    assert [record.getMessage() for record in caplog.records] == [
        "2 ports of the job take no connections from other hosts"
    ]


def test_where_the_system_does_not_allow_it_ports_stay_as_they_are(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, number: int) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host_ports, "_take_socket", refuse)
    with caplog.at_level(logging.INFO):
        HostPorts(child.process.pid).tend(all_are_there=True)
    assert "does not let a parent see them (Operation not permitted)" in caplog.text
    assert [lets_in(port) for port in child.ports] == [True, True]


def test_a_job_that_is_over_has_no_ports(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    child.process.kill()
    child.process.wait()
    with caplog.at_level(logging.INFO):
        HostPorts(child.process.pid).tend(all_are_there=True)
    assert [record.getMessage() for record in caplog.records] == [
        "0 ports of the job take no connections from other hosts"
    ]


@pytest.mark.parametrize("number", [errno.EBADF, errno.ESRCH, errno.ENOENT])
def test_descriptors_that_are_closed_meanwhile_are_passed_over(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    own_take, asked = host_ports._take_socket, []

    def take(handle: int, descriptor: int) -> socket.socket:
        asked.append(descriptor)
        if len(asked) == 1:
            raise OSError(number, os.strerror(number))
        return own_take(handle, descriptor)

    monkeypatch.setattr(host_ports, "_take_socket", take)
    with caplog.at_level(logging.INFO):
        HostPorts(child.process.pid).tend(all_are_there=True)
    assert sum(lets_in(port) for port in child.ports) == 1
    assert caplog.records[0].getMessage() == "1 ports of the job take no connections from other hosts"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_a_process_that_ends_meanwhile_is_passed_over(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """What is to be seen of it is gone, or root's."""
    found = iter([[child.process.pid]])
    monkeypatch.setattr(host_ports, "session_processes", lambda session: next(found, []))
    child.process.kill()
    child.process.wait()
    handles: list[int] = []

    def open_handle(process: int) -> int:
        """As before its end."""
        handles.append(os.open("/dev/null", os.O_RDONLY))
        return handles[-1]

    def look(folder: Path) -> list[Path]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", open_handle)
    monkeypatch.setattr(Path, "iterdir", look)
    with caplog.at_level(logging.INFO):
        HostPorts(child.process.pid).tend(all_are_there=True)
    assert handles and caplog.records[0].getMessage() == "0 ports of the job take no connections from other hosts"


@pytest.mark.parametrize("all_are_there", [False, True])
def test_a_system_that_takes_no_filter_ends_no_job(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, all_are_there: bool
) -> None:
    def refuse(listening: socket.socket, but_from: int | None = None) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    ports = HostPorts(child.process.pid)
    monkeypatch.setattr(host_ports, "drop_packets", refuse)
    with caplog.at_level(logging.INFO):
        ports.tend(all_are_there)
        ports.tend(all_are_there=True)
    assert [record.getMessage() for record in caplog.records] == [
        "0 ports of the job take no connections from other hosts; the system does not let a parent filter them "
        "(Cannot allocate memory): others stay open"
    ]
    assert [lets_in(port) for port in child.ports] == [True, True]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_system_without_handles_of_processes_is_told(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(process: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with caplog.at_level(logging.INFO):
        HostPorts(child.process.pid).tend(all_are_there=True)
    assert f"does not let a parent see them ({os.strerror(number)})" in caplog.text


def test_shared_memory_has_room_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room:
        f_bavail, f_frsize = 3, BYTES_A_RANK

    asked: list[object] = []
    monkeypatch.setattr(os, "statvfs", lambda folder: asked.append(folder) or Room)
    assert has_room("FOLDER", {}, 3) and not has_room("FOLDER", {"FOLDER": "/"}, 4)
    assert list(map(str, asked)) == ["/dev/shm", "/"]
    monkeypatch.undo()
    assert not has_room("FOLDER", {"FOLDER": "/no/such/folder"}, 1)
