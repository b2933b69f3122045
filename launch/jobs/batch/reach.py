"""How a server inside a batch job is reached from elsewhere: one line, for its log and for `trtrun status`.

It knows addresses and the variables of batch systems. It starts nothing.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from launch.jobs.placement.allocation import find_job

FORWARDED_PORT = 8000
"""Of the machine from which a socket is reached."""

_SERVED = re.compile(r"trtrun: \S.* is served at (\S+), metrics at \S+")
_WAY = re.compile(r"trtrun: from another machine: (.+)")
_BEGUN = re.compile(r"trtrun: \S+ job \d+ on \S+, start \d+")


def describe_way(url: str, is_loopback: bool, environment: Mapping[str, str]) -> str | None:
    """What to do on another machine to reach a server that listens here; None outside a batch job.

    Args:
        url: of the server, as this host sees it: `unix:///PATH` of a socket.
        is_loopback: whether only this host reaches it.
        environment: of this process.
    """
    if find_job(environment) is None:
        return None
    address = urlsplit(url)
    node = environment.get("SLURMD_NODENAME") or socket.gethostname()
    if not is_loopback:
        return f"{address.scheme}://{node}:{address.port}"
    login = environment.get("SLURM_SUBMIT_HOST") or environment.get("PBS_O_HOST") or node
    jump = f"-J {login} " if login != node else ""
    path = socket_path(url)
    if path is not None:
        return (
            f"ssh -N -L {FORWARDED_PORT}:{shlex.quote(path)} {jump}{node}, and then http://127.0.0.1:{FORWARDED_PORT}"
        )
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    tunnel = f"ssh -N -L {address.port}:{host}:{address.port} {jump}{node}"
    return f"{tunnel}, and then {address.scheme}://127.0.0.1:{address.port}"


def socket_path(url: str) -> str | None:
    """The path of a server's socket; None where it has a port."""
    address = urlsplit(url)
    return unquote(address.path) if address.scheme == "unix" else None


def tell_way(way: str) -> str:
    """The line of the log, without its `trtrun: `."""
    return f"from another machine: {way}"


@dataclass(frozen=True)
class Served:
    """What a log says of a server.

    Attributes:
        url: on its own host.
        way: from another machine; None where the log does not tell it.
    """

    url: str
    way: str | None


def find_served(log: str) -> Served | None:
    """Where the server of a batch job listens; None where its last start has not come so far.

    Args:
        log: of the job, with all its starts.
    """
    begun = list(_BEGUN.finditer(log))
    last = log[begun[-1].end() :] if begun else log
    served, way = _SERVED.search(last), _WAY.search(last)
    return Served(served[1], way[1] if way else None) if served else None
