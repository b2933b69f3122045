"""What a configuration needs of a batch system: nodes, ranks and GPUs on each. Known before there is an allocation.

Counted devices are placed on hosts with made-up names, as they will be placed on the allocation's when the job runs.
`trtrun plan` puts a job there, too, whose counted devices need more than this host has: so the plan of a batch job is
what the job does. It does not know scripts (script.py), and it starts nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from launch.jobs.batch.scheduler import BatchSection
from launch.jobs.placement.allocation import in_allocation, is_local
from launch.jobs.placement.devices import ENGINES, Allocation, fill_counts, list_devices, spell_hosts
from launch.jobs.placement.run_config import (
    DEFAULT_HOST,
    engine_sections,
    is_model_here,
    make_run_config,
    name_places,
)
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import MOST_DEVICES, host_of, is_counts
from trtrun.configuration.engine_sections import check_section
from trtrun.configuration.process_sections import Section
from trtrun.configuration.topology import make_topology
from trtrun.errors import ConfigError, shorten
from trtrun.threads import CORES_OF_CUDA_SLOT

PREFIX = "node-"
"""Of made-up names: node-1 stands for the first node of the allocation, and so on."""

MANY_CPUS = 1024
"""A CPU slot of its own for everyone: the job asks for as many cores as it has ranks, so that is what it will find."""

OwnSection = TypeVar("OwnSection")


@dataclass(frozen=True)
class BatchResources:
    """What a job takes, and of which nodes.

    Attributes:
        config: of the run; its model directories are those of this host.
        section: what the configuration says of the batch job.
        topology: the ranks, on hosts that the configuration names, and made-up ones.
        hosts: all of them. Where none is named, they stand for the allocation's nodes in its order.
        named: those that the configuration names.
        nodes: nodes to ask for.
        gpus: GPUs of each node, 0 for none.
        has_local_models: whether the model directories are the same on every host, so that they can be checked here.
    """

    config: RuntimeConfig
    section: BatchSection
    topology: Topology
    hosts: tuple[str, ...]
    named: tuple[str, ...]
    nodes: int
    gpus: int
    has_local_models: bool

    def section_as(self, section_class: type[OwnSection]) -> OwnSection:
        """The section of a job whose batch system is known."""
        assert isinstance(self.section, section_class)
        return self.section

    @property
    def tasks_per_node(self) -> int:
        """The most ranks of any node."""
        return max(Counter(self.topology.host(rank) for rank in range(self.topology.world_size)).values())

    @property
    def cpus_per_task(self) -> int | None:
        """CPU cores of each rank: those of the section, else as many as the slots compute on; None where neither says
        more than batch systems' own, one."""
        if self.section.cpus_per_task is not None:
            return self.section.cpus_per_task
        threads = self.config.threads or 1
        cores = [threads if slot.device.startswith("cpu") else CORES_OF_CUDA_SLOT for slot in self.topology.slots]
        return most if (most := max(cores)) > 1 else None

    @property
    def lacks_cores(self) -> bool:
        """Whether nothing says how many cores a job of one process on the CPU takes."""
        is_asked = self.cpus_per_task is not None or self.config.threads is not None or self.section.takes_whole_nodes
        return self.topology.world_size == 1 and not self.gpus and not is_asked


def read_resources(
    path: Path,
    values: dict[str, Any],
    section_class: type[BatchSection],
    changes: Mapping[str, object] | None = None,
    place_ranks: Callable[[RuntimeConfig], Topology] = make_topology,
) -> BatchResources:
    """What a YAML file asks for as `trtrun submit` sees it: without an allocation, for one that is to come.

    Args:
        path: the YAML file.
        values: what it holds.
        section_class: of the batch system.
        changes: keys of the batch system's section that command line options set.
        place_ranks: who sits where.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    values, section = _read_section(values, section_class, changes or {}, str(path))
    values = spell_hosts(values)
    named = tuple(_named_hosts(values))
    # Devices without a host are those of the node that the batch script runs on: the allocation's first.
    values = spell_hosts(values, home=(*named, f"{PREFIX}1")[0])
    values, hosts = _fill(values, named, section, str(path))
    values, has_local_models = _settle_models(values)
    config = _make(values, path)
    used = {host_of(device) for device in (*config.target.devices, *config.draft_devices)}
    used_hosts = tuple(host for host in hosts if host in used)
    if config.launch.orchestrator_host is None:
        # Rank 0 is on the host where the batch script runs, where that has a device.
        launch = config.launch.model_copy(update={"orchestrator_host": used_hosts[0]})
        config = config.model_copy(update={"launch": launch})
    topology = place_ranks(config)
    nodes = section.nodes or len(used_hosts)
    if nodes != len(used_hosts):
        raise ConfigError(
            f"{path}: {section.place_in_file}.nodes: {nodes} nodes are to be asked for, but the devices use "
            f"{len(used_hosts)}: leave the key out, or change the devices"
        )
    gpus = _count_gpus(topology)
    resources = BatchResources(config, section, topology, used_hosts, named, nodes, gpus, has_local_models)
    _check_gpus(resources, str(path))
    return resources


def make_plan_config(
    path: Path, values: dict[str, Any], section_class: type[BatchSection]
) -> tuple[RuntimeConfig, tuple[str, ...]]:
    """The configuration of a job that is not started; its hosts are simulated where counts ask for more than is here.

    Args:
        path: the YAML file.
        values: what it holds.
        section_class: of the batch system.

    Returns:
        The configuration, and the names of the simulated hosts; none where all hosts are real.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    try:
        return _make(name_places(values), path), ()
    except ConfigError as error:
        counted = any(is_counts(section.get("devices")) for section in engine_sections(values))
        if in_allocation() or not counted:
            raise ConfigError(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}") from None
    return place_on_simulated_hosts(path, values, read_resources(path, values, section_class))


def place_on_simulated_hosts(
    path: Path, values: Mapping[str, Any], resources: BatchResources
) -> tuple[RuntimeConfig, tuple[str, ...]]:
    """The configuration with its devices where a batch job will have them; otherwise like `make_plan_config`."""
    placed = {
        "target": {**values["target"], "devices": list(resources.config.target.devices)},
        "launch": {**(values.get("launch") or {}), "orchestrator_host": resources.config.launch.orchestrator_host},
    }
    if resources.config.draft_devices:
        placed["draft"] = {**values["draft"], "devices": list(resources.config.draft_devices)}
    return _make({**values, **placed}, path), tuple(host for host in resources.hosts if host not in resources.named)


def _make(values: Mapping[str, Any], path: Path) -> RuntimeConfig:
    return make_run_config({"values": values, "base": str(path.resolve().parent), "where": str(path)})


def _fill(
    values: dict[str, Any], named: tuple[str, ...], section: BatchSection, where: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values with counts filled from hosts that are named, and made up where those are too few; and all hosts."""
    counted = _most_nodes(values)
    if not counted:
        return values, named or (f"{PREFIX}1",)
    made_up = tuple(f"{PREFIX}{number + 1}" for number in range(max(counted, section.nodes or 0)))
    hosts = named + made_up[len(named) :]
    asked = section.gpu_request
    allocation = Allocation(hosts, None if asked is None else asked.count, MANY_CPUS, section.place_in_file)
    try:
        return fill_counts(values, lambda: allocation), hosts
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_gpus(resources: BatchResources, where: str) -> None:
    asked, needed = resources.section.gpu_request, resources.gpus
    if asked is not None and asked.count < needed:
        raise ConfigError(
            f"{where}: {resources.section.place_in_file}.{asked.key}: {asked.value!r} asks for {asked.count} GPUs "
            f"a node, but the devices need {needed}: leave the key out, or ask for {asked.example.format(needed)}"
        )


def _count_gpus(topology: Topology) -> int:
    """GPUs that each node must have: they are numbered from 0, so the highest number counts."""
    numbers = [int(slot.device.partition(":")[2]) for slot in topology.slots if slot.device.startswith("cuda")]
    return 1 + max(numbers, default=-1)


def _read_section(
    values: dict[str, Any], section_class: type[BatchSection], changes: Mapping[str, object], where: str
) -> tuple[dict[str, Any], BatchSection]:
    """The values with some keys of the batch system's section set, and what the section then says."""
    name = section_class.place_in_file.rpartition(".")[2]
    launch = values.get("launch") or {}
    keys = launch.get(name) or {} if isinstance(launch, dict) else {}
    for place, section in (("launch", launch), (section_class.place_in_file, keys)):
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: {place}: must be a section with keys, not {shorten(section)}")
    keys = {**keys, **changes}
    read = check_section(cast("type[Section]", section_class), keys, where, ("launch", name))
    return {**values, "launch": {**launch, name: keys}}, cast("BatchSection", read)


def _most_nodes(values: Mapping[str, Any]) -> int:
    """The most nodes that one engine counts, 0 where nothing is counted."""
    counts = [section["devices"] for section in engine_sections(values) if is_counts(section.get("devices"))]
    # No more than can be filled: `fill_counts` says what is wrong with a number beyond.
    return max((min(max(1, _whole(count.get("nodes", 1))), MOST_DEVICES) for count in counts), default=0)


def _named_hosts(values: Mapping[str, Any]) -> list[str]:
    """Hosts that the devices name, in the order that Slurm gives them to a job: numbers in names count as numbers."""
    hosts = {host_of(device) for devices in list_devices(values).values() for device in devices}
    return sorted(hosts - {""}, key=_natural)


def _natural(host: str) -> list[tuple[str, int]]:
    return [(text, int(number or -1)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", host)]


def _whole(value: object) -> int:
    """The number, or 0 for what is none: the configuration's check says what is wrong with it."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _settle_models(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Replace models that have a path for each host by a path of this host, and tell whether there was none such.

    A path of another host cannot be looked at from here. The small pair stands in for it, so that the rest of the
    configuration can be checked.
    """
    settled = dict(values)
    is_same_everywhere = True
    for name in ENGINES:
        section = values.get(name)
        model = section.get("model") if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(model, dict):
            continue
        is_same_everywhere = False
        own = next((path for host, path in model.items() if host != DEFAULT_HOST and is_local(host)), None)
        path = own or model.get(DEFAULT_HOST)
        if not is_model_here(path):
            path = f"asset:{name}"
        settled[name] = {**section, "model": path}
    return settled, is_same_everywhere
