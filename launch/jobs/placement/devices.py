"""From the configuration's devices to a Topology: counts become names, each host gets one name, and all must be there.

It knows an allocation as host names and GPUs a host. It does not know MPI, or where the allocation comes from
(allocation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from parallel.topology import Topology
from trtrun.configuration.device_lists import (
    COUNT_KEYS,
    check_host,
    check_number,
    host_of,
    is_counts,
    is_same_host,
    kind_of,
    parse_devices,
)
from trtrun.configuration.drafting.drafting_methods import needs_draft_model, needs_heads
from trtrun.errors import ConfigError, nearest, shorten


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


ENGINES = ("target", "draft")


def list_devices(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Devices of each engine that names them, the target's first. An engine without a rank, that counts, or whose
    devices are wrong (`make_config` says how) is left out.

    Args:
        values: the YAML file's mapping.
    """
    unused = _unused_engines(values)
    found: dict[str, tuple[str, ...]] = {}
    for name in ENGINES:
        section = values.get(name)
        devices = section.get("devices") if isinstance(section, dict) else None
        if devices is None or is_counts(devices) or name in unused:
            continue
        try:
            found[name] = parse_devices(devices)
        except ValueError:
            continue
    return found


def spell_hosts(values: Mapping[str, Any], hosts: Sequence[str] = (), home: str = "") -> dict[str, Any]:
    """Give each host one name wherever the configuration places something: "node1" and "node1.cluster" are one host.

    Args:
        values: the YAML file's mapping.
        hosts: names that come before the configuration's own, such as the allocation's.
        home: host of the devices that name none; empty leaves them so.
    """
    spelled = dict(values)
    devices = list_devices(values)
    launch = values.get("launch")
    orchestrator = launch.get("orchestrator_host") if isinstance(launch, dict) else None
    known = list(hosts)

    def spell(host: str) -> str:
        match = next((name for name in known if is_same_host(name, host)), None)
        if match is None:
            known.append(host)
        return match or host

    for engine, names in devices.items():
        pairs = [(host_of(name) or home, name.rpartition("/")[2]) for name in names]
        listed = [f"{spell(host)}/{device}" if host else device for host, device in pairs]
        spelled[engine] = {**values[engine], "devices": listed}
    if isinstance(launch, dict) and isinstance(orchestrator, str):
        spelled["launch"] = {**launch, "orchestrator_host": spell(orchestrator)}
    return spelled


def check_granted(values: Mapping[str, Any], allocation: Allocation) -> None:
    """Raise ConfigError for a device on a host that the allocation lacks, or beyond the GPUs of its host.

    Args:
        values: the YAML file's mapping, with counts filled and hosts as the allocation spells them.
        allocation: with named hosts.
    """
    for engine, names in list_devices(values).items():
        for name in names:
            host = host_of(name)
            if host and host not in allocation.hosts:
                raise ConfigError(
                    f"{engine}.devices: {host} is not in {allocation.source}{nearest(host, allocation.hosts)}: "
                    "name its hosts, or ask for this one"
                )
            number = int(name.rpartition(":")[2])
            if kind_of(name) == "cuda" and allocation.gpus is not None and number >= allocation.gpus:
                have = f"GPUs 0 to {allocation.gpus - 1}" if allocation.gpus else "no GPU"
                raise ConfigError(
                    f"{engine}.devices: {name} is not in {allocation.source}, which has {have} on each node: "
                    "ask for more GPUs, or use fewer"
                )


def fill_counts(values: Mapping[str, Any], find_allocation: Callable[[], Allocation]) -> dict[str, Any]:
    """Replace `devices: {nodes: N, gpus_per_node: M}` by the names of devices; everything else stays.

    The target takes the first M devices of the first N hosts that the draft does not name. The draft takes devices
    that are still free, host by host, where there are enough of them, and shares the target's first ones otherwise.

    Args:
        values: the YAML file's mapping.
        find_allocation: returns the hosts to fill from; called only where something is counted.

    Raises:
        ConfigError: the counts are no counts, or the allocation has not so much.
    """
    filled = dict(values)
    taken = {device for devices in list_devices(values).values() for device in devices}
    unused = _unused_engines(values)
    for name in ENGINES:
        section = values.get(name)
        if not isinstance(section, dict) or not is_counts(section.get("devices")):
            continue
        if name in unused:
            continue
        allocation = find_allocation()
        nodes, per_node, kind = _read_counts(section["devices"], f"{name}.devices")
        _check_room(nodes, per_node, kind, allocation, f"{name}.devices")
        devices = _choose(nodes, per_node, kind, allocation, taken)
        taken.update(devices)
        filled[name] = {**section, "devices": devices}
    return filled


def count_host_slots(topology: Topology, host: str = "") -> int:
    """Slots that share one host's cores and memory; GPU slots count too, their processes run there as well."""
    return len(topology.slots_of_host(host))


def _unused_engines(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Engines that get no rank, whatever their section says."""
    speculation = values.get("speculation")
    return () if needs_draft_model(speculation) or needs_heads(speculation) else ("draft",)


def _read_counts(value: Mapping[str, object], where: str) -> tuple[int, int, str]:
    """Nodes, devices a node and their kind."""
    for key, number in value.items():
        if key not in COUNT_KEYS:
            raise ConfigError(f"{where}.{key}: unknown key{nearest(str(key), COUNT_KEYS)}")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{where}.{key}: must be a number of 1 or more, not {shorten(number)}")
    kinds = [key for key in ("gpus_per_node", "cpus_per_node") if key in value]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: write gpus_per_node or cpus_per_node beside nodes, one of them")
    per_node = value[kinds[0]]
    nodes = value.get("nodes", 1)
    assert isinstance(per_node, int) and isinstance(nodes, int)
    try:
        check_number(nodes * per_node)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
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
    names = (f"{prefix}{kind}:{index}" for index in range(max(most, per_node) if kind == "cpu" else most))
    yield from islice((name for name in names if name not in taken), per_node)
