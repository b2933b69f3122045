"""What this job may use: the hosts and GPUs of its Slurm or PBS allocation, or this host alone.

It reads the environment and names of hosts. It does not know which devices a configuration asks for (devices.py).
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

from launch.jobs.placement.devices import Allocation
from trtrun.configuration.device_lists import check_host, is_same_host
from trtrun.errors import ConfigError
from trtrun.threads import count_cores

MOST_HOSTS = 65536
"""Of one list, as Slurm itself has it: a misprint must not fill the memory."""

_NO_GPU = ("-1", "NoDevFiles")
"""What stands in CUDA_VISIBLE_DEVICES where no GPU is granted; CUDA counts up to the first such entry."""

_ITEM = r"[^,\[\]]*(?:\[[^\[\]]+\][^,\[\]]*)*"


def in_allocation(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs in an allocation of Slurm or PBS."""
    values = os.environ if environment is None else environment
    return in_slurm(values) or _in_pbs(values)


def in_slurm(environment: Mapping[str, str]) -> bool:
    """Whether a process runs in a Slurm allocation, where Slurm itself starts processes on other nodes."""
    return bool(environment.get("SLURM_JOB_NODELIST"))


def find_job(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The batch system and the number of the job that a process runs in; None outside one."""
    for system, variable in (("Slurm", "SLURM_JOB_ID"), ("PBS", "PBS_JOBID")):
        if environment.get(variable):
            return system, environment[variable].partition(".")[0]
    return None


def is_outside(environment: Mapping[str, str]) -> bool:
    """Whether the environment speaks of a Slurm job that this host has no part in: a login node's, or one that is over.

    Args:
        environment: of this process, or of one that it starts.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    return bool(nodes) and not _names_host(nodes, socket.gethostname()) and "SLURMD_NODENAME" not in environment


def find_allocation(environment: Mapping[str, str] | None = None) -> Allocation:
    """The allocation that this process runs in: Slurm's, PBS's, or this host alone under an empty name.

    Args:
        environment: default os.environ. SLURM_JOB_NODELIST names the hosts; SLURM_GPUS_ON_NODE, then
            CUDA_VISIBLE_DEVICES count their GPUs, which Slurm grants alike on every node, unless the job asked for a
            number over all nodes (SLURM_GPUS): then they are not known. Of PBS the file PBS_NODEFILE names the hosts,
            and CUDA_VISIBLE_DEVICES, where PBS sets it, counts GPUs.

    Raises:
        ConfigError: what names the hosts is no list of them.
    """
    values = os.environ if environment is None else environment
    if not in_allocation(values):
        return Allocation(("",), _count_local_gpus(), count_cores(), "this host, outside a batch job,")
    if not in_slurm(values):
        return _find_pbs_allocation(values)
    try:
        hosts = tuple(check_host(host) for host in expand_hosts(values["SLURM_JOB_NODELIST"]))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"SLURM_JOB_NODELIST: {error}") from None
    return Allocation(
        hosts,
        _count_granted_gpus(values, len(hosts)),
        _count_granted_cores(values),
        f"Slurm job {values.get('SLURM_JOB_ID', '?')}",
    )


def _in_pbs(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("PBS_JOBID") and environment.get("PBS_NODEFILE"))


def _find_pbs_allocation(values: Mapping[str, str]) -> Allocation:
    """The allocation of a job of PBS: its file has a line for each rank that was asked for, node by node; NCPUS are the
    cores of a node."""
    try:
        lines = Counter(Path(values["PBS_NODEFILE"]).read_text(encoding="utf-8").split())
        hosts = tuple(check_host(line) for line in lines)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"PBS_NODEFILE: {error}") from None
    if not hosts:
        raise ConfigError(f"PBS_NODEFILE: {values['PBS_NODEFILE']} names no host")
    cores = values.get("NCPUS", "")
    cpus = max(*lines.values(), int(cores) if cores.isdecimal() else 1)
    return Allocation(hosts, _count_visible_gpus(values), cpus, f"PBS job {values['PBS_JOBID'].partition('.')[0]}")


def expand_hosts(names: str) -> list[str]:
    """Expand Slurm's compressed list of hosts: "n[1-2,05],login" → n1, n2, n05, login.

    Raises:
        ConfigError: it is no such list.
    """
    text = "".join(names.split())
    if not re.fullmatch(f"{_ITEM}(?:,{_ITEM})*", text):
        raise ConfigError(f"{names!r} is no list of hosts: its brackets do not fit together")
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        for host in _expand(item):
            hosts.append(host)
            if len(hosts) > MOST_HOSTS:
                raise ConfigError(f"{names!r} is no list of hosts: it names more than {MOST_HOSTS}")
    return hosts


def is_local(host: str) -> bool:
    """Whether a host of the configuration is the one that this process runs on.

    Names are compared whole and up to the first dot, with this machine's name and, where Slurm does not know that one,
    with the name that Slurm gives it (SLURMD_NODENAME); an address is local when a socket can be bound to it.
    """
    return has_own_name(host) or _owns_address(host)


def has_own_name(host: str) -> bool:
    """Whether a host is this one by its name alone; no network is asked."""
    if host in ("", "localhost"):
        return True
    own = socket.gethostname()
    if is_same_host(host, own):
        return True
    # Slurm may call a node otherwise than the machine calls itself. Only then its word counts: some MPIs carry the
    # environment of the first node to all others.
    node, nodes = os.environ.get("SLURMD_NODENAME", ""), os.environ.get("SLURM_JOB_NODELIST", "")
    return is_same_host(host, node) and not _names_host(nodes, own)


def find_local(hosts: Iterable[str]) -> str | None:
    """The first of the hosts that is this one, None where none is. Names come before addresses, which may need DNS."""
    names = list(hosts)
    return next(filter(has_own_name, names), None) or next(filter(_owns_address, names), None)


def _expand(item: str) -> Iterator[str]:
    """All hosts of one item, which may hold several brackets."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]+)\](.*)", item)
    if match is None:
        yield item
        return
    for piece in match[2].split(","):
        bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ConfigError(f"{item!r} is no list of hosts: {piece!r} is no range of numbers")
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expand(match[3]):
                yield f"{match[1]}{number:0{len(first)}d}{rest}"


def _count_granted_cores(values: Mapping[str, str]) -> int | None:
    """Cores of the node that has fewest, such as 8 of "16,8(x2)"; None where they are not known.

    A login node with the job's shell knows no other number than the job's, and ranks must come to the same.
    """
    told = values.get("SLURM_JOB_CPUS_PER_NODE") or values.get("SLURM_CPUS_ON_NODE", "")
    counts = [re.fullmatch(r"([0-9]+)(?:\(x[0-9]+\))?", item) for item in told.split(",")]
    return min((int(count[1]) for count in counts if count is not None), default=None)


def _count_granted_gpus(values: Mapping[str, str], num_hosts: int) -> int | None:
    """GPUs of each host of a Slurm job, None where they are not known."""
    if num_hosts > 1 and values.get("SLURM_GPUS") and not values.get("SLURM_GPUS_PER_NODE"):
        return None
    # A login node has the second alone, such as "a100:4".
    on_node = values.get("SLURM_GPUS_ON_NODE") or values.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if on_node.isdecimal():
        return int(on_node)
    return _count_visible_gpus(values)


def _count_visible_gpus(values: Mapping[str, str]) -> int | None:
    visible = values.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return len(list(takewhile(lambda entry: entry not in _NO_GPU, entries)))


@cache
def _names_host(names: str, host: str) -> bool:
    """Whether a list of hosts, as Slurm writes it, holds a host; what is no list holds none."""
    try:
        return any(is_same_host(host, name) for name in expand_hosts(names))
    except ConfigError:
        return False


@cache
def _owns_address(host: str) -> bool:
    """Whether the host's address is one of this machine's: no other address can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _count_local_gpus() -> int:
    import torch  # not at the top: counts are rare, and torch takes a second

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
