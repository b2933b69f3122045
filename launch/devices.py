"""From the configuration's devices to a Topology: counts become names, and the orchestrator gets its host.

It knows an allocation as host names and GPUs a host. It does not know MPI, or where the allocation comes from
(allocation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.config import RuntimeConfig
from trtrun.device_lists import COUNT_KEYS, check_host, is_counts
from trtrun.errors import ConfigError, TopologyError, nearest


@dataclass(frozen=True)
class Allocation:
    """What a job may use.

    Attributes:
        hosts: names, in the scheduler's order; one empty name stands for this host alone.
        gpus: GPUs of each host, None where it is not known.
        cpus: CPU cores of each host, None where it is not known.
        source: for messages, such as "Slurm job 17".
    """

    hosts: tuple[str, ...]
    gpus: int | None
    cpus: int | None
    source: str


def fill_counts(values: Mapping[str, Any], find_allocation: Callable[[], Allocation]) -> dict[str, Any]:
    """Replace `devices: {nodes: N, gpus_per_node: M}` by the names of devices; everything else stays.

    The target takes the first M devices of the first N hosts. The draft takes devices that are still free, host by
    host, where there are enough of them, and shares the target's first ones otherwise.

    Args:
        values: the YAML file's mapping.
        find_allocation: returns the hosts to fill from; called only where something is counted.

    Raises:
        ConfigError: the counts are no counts, or the allocation has not so much.
    """
    filled = dict(values)
    taken: set[str] = set()
    method = (values.get("speculation") or {}).get("method") if isinstance(values.get("speculation"), dict) else None
    for name in ("target", "draft"):
        section = values.get(name)
        if (
            not isinstance(section, dict)
            or not is_counts(section.get("devices"))
            or (name, method) == ("draft", "none")
        ):
            continue
        allocation = find_allocation()
        nodes, per_node, kind = _read_counts(section["devices"], f"{name}.devices")
        _check_room(nodes, per_node, kind, allocation, f"{name}.devices")
        devices = _choose(nodes, per_node, kind, allocation, taken)
        taken.update(devices)
        filled[name] = {**section, "devices": devices}
    return filled


def make_topology(config: RuntimeConfig) -> Topology:
    """Place both engines of a configuration.

    Raises:
        TopologyError: the device lists do not fit together.
    """
    try:
        return Topology.from_devices(config.draft_devices, config.target.devices, config.launch.orchestrator_host)
    except ParallelError as error:
        raise TopologyError(str(error)) from None


def count_host_slots(topology: Topology, host: str = "") -> int:
    """Slots that share one host's cores and memory; GPU slots count too, their processes run there as well."""
    return len(topology.slots_of_host(host))


def _read_counts(value: Mapping[str, object], where: str) -> tuple[int, int, str]:
    """Nodes, devices a node and their kind."""
    for key, number in value.items():
        if key not in COUNT_KEYS:
            raise ConfigError(f"{where}.{key}: unknown key{nearest(str(key), COUNT_KEYS)}")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{where}.{key}: must be a number of 1 or more, not {number!r}")
    kinds = [key for key in ("gpus_per_node", "cpus_per_node") if key in value]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: write gpus_per_node or cpus_per_node beside nodes, one of them")
    per_node = value[kinds[0]]
    nodes = value.get("nodes", 1)
    assert isinstance(per_node, int) and isinstance(nodes, int)
    return nodes, per_node, "cuda" if kinds[0] == "gpus_per_node" else "cpu"


def _check_room(nodes: int, per_node: int, kind: str, allocation: Allocation, where: str) -> None:
    if nodes > len(allocation.hosts):
        have = f"{len(allocation.hosts)} node{'s' if len(allocation.hosts) > 1 else ''}"
        raise ConfigError(
            f"{where}: {nodes} nodes are asked for, but {allocation.source} has {have}: "
            "ask for more nodes, or name the hosts"
        )
    most = allocation.gpus if kind == "cuda" else None  # CPU slots may outnumber cores
    if most is not None and per_node > most:
        raise ConfigError(
            f"{where}: {per_node} GPUs a node are asked for, but {allocation.source} has {most} on each: "
            "ask for more GPUs, or use fewer"
        )


def _choose(nodes: int, per_node: int, kind: str, allocation: Allocation, taken: set[str]) -> list[str]:
    """The devices of one engine, host by host."""
    free = [list(_free_devices(host, per_node, kind, allocation, taken)) for host in allocation.hosts]
    whole = [devices for devices in free if len(devices) == per_node]
    if len(whole) < nodes:
        whole = [list(_free_devices(host, per_node, kind, allocation, set())) for host in allocation.hosts]
    return [device for devices in whole[:nodes] for device in devices]


def _free_devices(host: str, per_node: int, kind: str, allocation: Allocation, taken: set[str]) -> Iterator[str]:
    """Up to `per_node` devices of a host that nobody has taken. A host of unknown size has what is asked for."""
    known = allocation.gpus if kind == "cuda" else allocation.cpus
    most = known if known is not None else per_node
    prefix = f"{check_host(host)}/" if host else ""
    names = [f"{prefix}{kind}:{index}" for index in range(max(most, per_node) if kind == "cpu" else most)]
    yield from [name for name in names if name not in taken][:per_node]
