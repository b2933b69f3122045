"""What this job may use: the hosts and GPUs of its Slurm allocation, or this host alone.

It reads the environment and names of hosts. It does not know which devices a configuration asks for (devices.py).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from functools import cache

from launch.devices import Allocation
from trtrun.errors import ConfigError
from trtrun.threads import count_cores


def find_allocation(environment: Mapping[str, str] | None = None) -> Allocation:
    """The allocation that this process runs in: Slurm's, or this host alone under an empty name.

    Args:
        environment: default os.environ. SLURM_JOB_NODELIST names the hosts; SLURM_GPUS_ON_NODE, then
            CUDA_VISIBLE_DEVICES count their GPUs, which Slurm grants alike on every node.
    """
    values = os.environ if environment is None else environment
    names = values.get("SLURM_JOB_NODELIST", "")
    if not names:
        return Allocation(("",), _count_local_gpus(), count_cores(), "this host, outside a Slurm allocation,")
    gpus = values.get("SLURM_GPUS_ON_NODE", "")
    visible = values.get("CUDA_VISIBLE_DEVICES")
    if gpus.isdecimal():
        count: int | None = int(gpus)
    else:
        count = None if visible is None else len([part for part in visible.split(",") if part.strip()])
    cpus = values.get("SLURM_CPUS_ON_NODE", "")
    return Allocation(
        tuple(expand_hosts(names)),
        count,
        int(cpus) if cpus.isdecimal() else None,
        f"Slurm job {values.get('SLURM_JOB_ID', '?')}",
    )


def expand_hosts(names: str) -> list[str]:
    """Expand Slurm's compressed list of hosts: "n[1-2,05],login" → n1, n2, n05, login.

    Raises:
        ConfigError: it is no such list.
    """
    if names.count("[") != names.count("]"):
        raise ConfigError(f"{names!r} is no list of hosts: a bracket is missing")
    return [host for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", names) for host in _expand(part)]


def is_local(host: str) -> bool:
    """Whether a host of the configuration is the one that this process runs on.

    Names are compared whole and up to the first dot; an address is local when a socket can be bound to it.
    """
    if host in ("", "localhost"):
        return True
    own = socket.gethostname()
    if host == own or (("." not in host or "." not in own) and host.partition(".")[0] == own.partition(".")[0]):
        return True
    return _owns_address(host)


def _expand(part: str) -> Iterator[str]:
    """All hosts of one item, which may hold several brackets."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]+)\](.*)", part)
    if match is None:
        yield part
        return
    for piece in match[2].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if bounds is None:
            raise ConfigError(f"{part!r} is no list of hosts: {piece!r} is no range of numbers")
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expand(match[3]):
                yield f"{match[1]}{number:0{len(first)}d}{rest}"


@cache
def _owns_address(host: str) -> bool:
    """Whether the host's address is one of this machine's: no other address can be bound."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except OSError:
        return False
    return False


def _count_local_gpus() -> int:
    import torch  # not at the top: counts are rare, and torch takes a second

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
