"""Whose the other end of a connection on this host is, as the kernel's tables say. It knows addresses and users."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

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
