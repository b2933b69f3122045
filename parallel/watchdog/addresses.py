"""Where rank 0 listens: a port of this host alone or of all its interfaces, and the addresses that others try.

It knows Linux's interfaces. It does not know who connects.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_BACKLOG = 1024
_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's IPv4 address


def listen(everywhere: bool) -> socket.socket:
    """A listening socket on a free port: of this host alone, or of all its interfaces."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def own_addresses() -> list[str]:
    """This host's addresses that other hosts may reach: of its interfaces, without the loopback ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                record = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(record[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return [address for address in found if not address.startswith("127.")]
