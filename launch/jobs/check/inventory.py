"""What each rank knows of itself and its host before weights load, and what must not differ between ranks.

`take_inventory` runs on every rank and never raises for what the user got wrong: it becomes a text, so that the
problems of all ranks can be told together. `find_misfits` compares the inventories of all ranks on one of them; it is
pure. Nothing here sends anything.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from launch.jobs.check.held_models import compare_engines, model_sections
from launch.jobs.check.surroundings import Surroundings, find_surroundings, short_version
from launch.jobs.placement.allocation import is_local
from launch.jobs.placement.links import show_ranks
from launch.jobs.placement.memory import JobMemory
from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun import __version__
from trtrun.configuration.engine_directory import ENGINE_FILE, is_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.configuration.model_paths import snapshot_of
from trtrun.errors import TrtrunError, name_section
from trtrun.kvcache.sizing import free_bytes_of_slot, tokens_of_blocks
from trtrun.loading.loading import check_embedding_and_head
from trtrun.loading.weight_check import check_model_weights
from trtrun.lora.lora_files import open_adapter
from trtrun.start.job_spec import JobSpec, read_draft_vocabularies
from trtrun.weights.checkpoint import read_json
from trtrun.weights.quantization_config import QUANTIZATION_FILE, configuration_bytes

PACKAGES = ("launch", "trtrun", "parallel")
NCCL = "NCCL"


@dataclass(frozen=True)
class RankInventory:
    """One rank's.

    Attributes:
        rank: world rank.
        host: what the host calls itself.
        process: its number there.
        is_placed: whether this is the host that the devices name, or none is named.
        versions: of everything that all ranks must have alike, by name.
        configs: hash of each model's config.json, and of ModelOpt's file beside it, by engine; without those that
            cannot be read.
        engines: hash of each model's engine.json, by engine, or "none" where weights are a checkpoint's; without those
            of which this rank holds nothing.
        snapshots: `org/name@commit` of each model, by engine, that lies in this host's Hugging Face cache.
        free_bytes: memory for this slot; None on a rank without a device, or where it is not known.
        shard_bytes: weights of this rank.
        compared_bytes: of its shards of engines, where they were read whole and are what was built.
        kv_tokens: what this rank could hold by itself.
        surroundings: MPI, what started the rank, what carries messages, the container; None in a short check.
        problems: what is wrong on this rank, one text each.
    """

    rank: int
    host: str
    process: int
    is_placed: bool
    versions: dict[str, str]
    configs: dict[str, str] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, str] = field(default_factory=dict)
    free_bytes: int | None = None
    shard_bytes: int = 0
    compared_bytes: int = 0
    kv_tokens: int | None = None
    surroundings: Surroundings | None = None
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankInventory:
        """From what `to_dict` gave, after a way through JSON."""
        told = values["surroundings"]
        surroundings = None if told is None else Surroundings.from_dict(told)
        return cls(**{**values, "surroundings": surroundings, "problems": tuple(values["problems"])})


def take_inventory(
    spec: JobSpec,
    rank: int,
    tell: Callable[[str], None] = lambda step: None,
    *,
    is_thorough: bool = False,
    looks_at_device: bool = True,
) -> RankInventory:
    """Look at this rank's host: versions, models, device, memory.

    Args:
        spec: as this rank sees it, with its own model directories.
        rank: this process's world rank.
        tell: called with what comes next, because file systems and drivers may hang.
        is_thorough: say what carries messages, too; read this rank's shards of engines whole, and compare them with
            what was built.
        looks_at_device: say what fits into its free memory; not where another job is to give that back first.
    """
    problems: list[str] = []
    config, topology = spec.config, spec.topology
    tell("versions of the software")
    host = socket.gethostname()
    slot = topology.slot(rank)
    with_nccl = slot is not None and slot.device.startswith("cuda") and len(topology.slots) > 1
    versions = _read_versions(topology.world_size > 1, with_nccl)
    is_placed = is_local(topology.host(rank))
    tell("reading the models' configurations")
    configs: dict[str, str] = {}
    engines: dict[str, str] = {}
    for name, section, is_held in model_sections(config, topology, rank):
        try:
            configs[name] = _read_model(spec, name, section, is_held)
            if is_held or is_engine(section.model):
                engines[name] = _read_built(section.model)
        except TrtrunError as error:
            problems.append(name_section(name, error))
        except OSError as error:
            problems.append(f"{name}: {section.model} cannot be read: {error.strerror or error}")
    if rank in topology.worker_ranks and not problems:
        try:
            _read_beside(spec, rank)
        except TrtrunError as error:
            problems.append(str(error))
    snapshots = {
        name: str(found)
        for name, section, _ in model_sections(config, topology, rank)
        if (found := snapshot_of(section.model))
    }
    inventory = RankInventory(
        rank, host, os.getpid(), is_placed, versions, configs, engines, snapshots, problems=tuple(problems)
    )
    if is_thorough:
        tell("asking for the MPI library")
        inventory = replace(inventory, surroundings=find_surroundings(topology.world_size > 1))
    if slot is None or problems or not is_placed:
        return inventory
    if is_thorough:
        compared, wrong = compare_engines(config, topology, rank, tell)
        inventory = replace(inventory, compared_bytes=compared, problems=wrong)
    if not looks_at_device:
        return inventory
    tell(f"looking at {slot.device}")
    return _look_at_device(inventory, spec, rank)


def find_misfits(ranks: Sequence[RankInventory], topology: Topology) -> list[str]:
    """All that is wrong with the ranks together, one line each; none where the job can start.

    Args:
        ranks: of all ranks, in rank order.
        topology: of the job.
    """
    return [
        *_misplaced(ranks, topology),
        *_different_versions(ranks),
        *(f"{describe_rank(topology, rank)}: {problem}" for rank in ranks for problem in rank.problems),
        *_different_models(ranks),
    ]


def describe_rank(topology: Topology, inventory: RankInventory) -> str:
    """A rank in messages, with its host: "target rank 2 (cpu:1) on node1"."""
    name = topology.describe(inventory.rank)
    return name if topology.host(inventory.rank) == inventory.host else f"{name} on {inventory.host}"


def _read_model(spec: JobSpec, role: str, section: ModelSection, is_held: bool) -> str:
    """Hash of config.json and of ModelOpt's file beside it; where this rank holds a shard, its weights are looked at as
    the loader will.

    Raises:
        TrtrunError, OSError: something cannot be read, or is not what loading needs.
    """
    path = Path(section.model)
    read_json(path, "config.json", required=True)
    if is_held:
        check_model_weights(path, spec.model_of(role), len(section.devices), section.quantization, section.load_format)
    return hashlib.sha256(b"\0".join(configuration_bytes(path))).hexdigest()[:16]


def _read_built(path: Path) -> str:
    return hashlib.sha256((path / ENGINE_FILE).read_bytes()).hexdigest()[:16] if is_engine(path) else "none"


def _read_beside(spec: JobSpec, rank: int) -> None:
    """Look at what a rank loads beside its models: heads, vocabularies, adapters.

    Raises:
        TrtrunError: one is wrong.
    """
    config, topology, model, heads = spec.config, spec.topology, spec.target, spec.heads
    if heads is not None and config.heads_apart and rank in topology.draft_ranks:
        check_embedding_and_head(config.target, model, heads.target_weights(model))
    if config.translates_drafts and rank in topology.draft_ranks:
        read_draft_vocabularies(spec)
    if rank in topology.target_ranks:
        for name, path in config.adapters.items():
            open_adapter(name, path, model, config.adapter_slots.max_rank)
    if config.draft is not None and config.draft_adapters and rank in topology.draft_ranks:
        for name, path in config.draft_adapters.items():
            open_adapter(name, path, spec.model_of("draft"), config.adapter_slots.max_rank, "draft_adapters")


def _look_at_device(inventory: RankInventory, spec: JobSpec, rank: int) -> RankInventory:
    """The inventory, with the memory of this rank's device and what fits into it."""
    config, topology = spec.config, spec.topology
    slot = topology.slot(rank)
    assert slot is not None
    values, name = inventory.to_dict(), describe_rank(topology, inventory)
    try:
        memory = JobMemory.read(spec)
        values["shard_bytes"] = sum(memory.shard_bytes(rank))
        values["free_bytes"] = free_bytes_of_slot(slot.device, len(topology.slots_of_host(slot.host)))
        size = memory.count_blocks(rank, values["free_bytes"], name)
        values["kv_tokens"] = tokens_of_blocks(size.blocks, config.kv_cache.block_size)
    except (TrtrunError, ParallelError) as error:
        # The rule of memory names the rank itself.
        values["problems"] = (*inventory.problems, str(error).removeprefix(f"{name}: "))
    return RankInventory.from_dict(values)


def _read_versions(with_mpi: bool, with_nccl: bool) -> dict[str, str]:
    """Versions by name, in the order in which they are told."""
    versions = {
        "trtrun": f"{__version__} ({hash_sources()})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
    }
    if with_mpi:
        import mpi4py
        from mpi4py import MPI

        versions["mpi4py"] = str(mpi4py.__version__)
        versions["MPI library"] = short_version(MPI.Get_library_version())
    if with_nccl:
        versions[NCCL] = _nccl_version()
    return versions


def _nccl_version() -> str:
    """Version of the NCCL that CuPy brings: "2.28.3"; or why there is none."""
    try:
        number = int(importlib.import_module("cupy.cuda.nccl").get_version())
    except Exception as error:  # CuPy raises many kinds where CUDA or NCCL libraries are missing
        return f"none ({type(error).__name__})"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@cache
def hash_sources() -> str:
    """A few digits over the code of all three packages: two copies of one version may differ. A process looks once."""
    root = Path(__file__).resolve().parents[3]
    total = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:8]


def _misplaced(ranks: Sequence[RankInventory], topology: Topology) -> Iterator[str]:
    """Ranks on hosts where they should not be."""
    for rank in ranks:
        if not rank.is_placed:
            yield (
                f"{topology.describe(rank.rank)} runs on {rank.host}, but its device is on {topology.host(rank.rank)}: "
                "start the ranks on the hosts that `trtrun plan` shows, in that order"
            )
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    if topology.hosts == ("",) and len(hosts) > 1:
        where = "; ".join(f"{host}: rank {show_ranks(r.rank for r in ranks if r.host == host)}" for host in hosts)
        yield f"the ranks are on {len(hosts)} hosts ({where}), but the devices name none: name the host of each device"


def _different_versions(ranks: Sequence[RankInventory]) -> Iterator[str]:
    """What is not the same version everywhere."""
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        found = _group(name, ((rank, rank.versions) for rank in ranks))
        if len(found) > 1:
            yield f"{name} is not the same everywhere: {_list_findings(found)}: install one version on all hosts"


def _different_models(ranks: Sequence[RankInventory]) -> Iterator[str]:
    """Models whose config.json, what is said beside it, engine or commit differs between ranks."""
    for name in ("draft", "target"):
        snapshots = _group(name, ((rank, rank.snapshots) for rank in ranks))
        configs = _group(name, ((rank, rank.configs) for rank in ranks))
        engines = _group(name, ((rank, rank.engines) for rank in ranks))
        if len(snapshots) > 1:
            yield (
                f"{name}: the Hugging Face caches do not have the same: {_list_findings(snapshots)}: name one commit "
                "(org/name@commit), and run `hf download org/name --revision commit` on each host"
            )
        elif len(configs) > 1:
            yield (
                f"{name}: config.json or {QUANTIZATION_FILE} is not the same everywhere: {_list_findings(configs)}: "
                "copy one model to all hosts"
            )
        elif len(engines) > 1:
            yield (
                f"{name}: {ENGINE_FILE} is not the same everywhere: {_list_findings(engines)}: copy one engine to all "
                "hosts"
            )


def _group(name: str, known: Iterable[tuple[RankInventory, dict[str, str]]]) -> dict[str, list[RankInventory]]:
    """The ranks that have something of a name, by what that is."""
    found: dict[str, list[RankInventory]] = {}
    for rank, values in known:
        if name in values:
            found.setdefault(values[name], []).append(rank)
    return found


def _list_findings(found: dict[str, list[RankInventory]]) -> str:
    return "; ".join(
        f"{value} on rank {show_ranks(rank.rank for rank in ranks)} "
        f"({', '.join(dict.fromkeys(rank.host for rank in ranks))})"
        for value, ranks in found.items()
    )
