"""The configuration of a run, the same on every rank: rank 0 reads the file, fills in the allocation and hands it on.

A shared file system is not needed for it: other ranks never open the file. Model directories may differ from host to
host (`model: {node1: PATH, default: PATH}`), and names are looked up in each host's cache; each rank takes its own. It
does not know what the sections mean.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launch.exit_codes import ExitCode
from launch.jobs.placement.allocation import find_allocation, find_local, has_own_name, in_allocation
from launch.jobs.placement.devices import (
    ENGINES,
    Allocation,
    check_granted,
    fill_counts,
    list_devices,
    spell_hosts,
)
from parallel.mpi_rank import MpiRank, all_gather_json, find_mpi_rank
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.device_lists import host_of, is_counts
from trtrun.configuration.model_paths import find_snapshot, read_hub_name
from trtrun.configuration.topology import make_topology
from trtrun.configuration.yaml_source import read_values
from trtrun.errors import ConfigError, PlacementError, TrtrunError

Result = TypeVar("Result")


def agree_on(make: Callable[[], Result], mpi_rank: MpiRank | None) -> Result:
    """Return what `make` makes, once all ranks agree that they could make it. Collective under mpirun.

    Args:
        make: raises a TrtrunError for what is wrong on this rank.
        mpi_rank: of this process among the ranks of mpirun.

    Raises:
        TrtrunError: what is wrong, in a process alone.
        SystemExit: something is wrong on some rank, and rank 0 has told it.
    """
    if mpi_rank is None or mpi_rank.size == 1:
        return make()
    try:
        result, problem = make(), None
    except TrtrunError as error:
        result, problem = None, str(error)
    from mpi4py import MPI

    problems = [text for text in all_gather_json(MPI.COMM_WORLD, problem) if text is not None]
    if problems:
        if mpi_rank.rank == 0:
            for text in problems:
                print(f"trtrun: {' '.join(text.split())}", file=sys.stderr, flush=True)
        # The end of rank 0 ends the job; the others wait for it at the end of MPI.
        raise SystemExit(ExitCode.REFUSED if mpi_rank.rank == 0 else ExitCode.DONE)
    assert result is not None
    return result


DEFAULT_HOST = "default"

Check = Callable[[Mapping[str, Any], str], None]
Read = Callable[[Path, Sequence[str]], dict[str, Any]]


def load_run_config(
    path: Path,
    overrides: Sequence[str],
    check: Check = lambda values, where: None,
    place_ranks: Callable[[RuntimeConfig], Topology] = make_topology,
    read: Read = read_values,
) -> RuntimeConfig:
    """Return the configuration of this run: read here, or from rank 0 where mpirun started several ranks.

    Collective under mpirun, and the first use of MPI there.

    Args:
        path: the YAML file.
        overrides: `key.path=value` strings.
        check: called with what the file holds and its name, where it is read; raises ConfigError for what is wrong in
            sections that the runtime does not read.
        place_ranks: who sits where.
        read: of the path and the overrides makes what the file holds.

    Raises:
        ConfigError: one line that names the file and the key.
        PlacementError: the ranks do not see each other (see `check_started_together`).
    """
    mpi_rank = find_mpi_rank()
    check_started_together(mpi_rank, os.environ)
    source: dict[str, Any] | None = None
    if mpi_rank is None or mpi_rank.rank == 0:
        values = read(path, overrides)
        check(values, str(path))
        try:
            values = name_places(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        source = {"values": values, "base": str(path.resolve().parent), "where": str(path)}
    if mpi_rank is not None and mpi_rank.size > 1:
        if source is not None:
            # What is wrong is said before MPI starts, and at once; so is a wrong number of ranks, by whoever asked.
            config = make_run_config(source, mpi_rank)
            if place_ranks(config).world_size != mpi_rank.size:
                return config
            if config.draft is not None:  # files of other hosts have no say in it
                draft = {**source["values"]["draft"], "vocabulary": config.draft.vocabulary}
                source["values"] = {**source["values"], "draft": draft}
        source = _share(source, mpi_rank)
    shared = source
    assert shared is not None
    return agree_on(lambda: make_run_config(shared, mpi_rank), mpi_rank)


def name_places(
    values: Mapping[str, Any], find_allocation: Callable[[], Allocation] = find_allocation
) -> dict[str, Any]:
    """Fill in what only the starting host knows: the allocation's devices, and the orchestrator's host.

    Args:
        values: the YAML file's mapping.
        find_allocation: returns what the job may use; called only where devices are counted, or in an allocation.

    Raises:
        ConfigError: a device is not in the allocation, or it has too few.
    """
    if in_allocation():
        allocation = find_allocation()
        counts = any(is_counts(section.get("devices")) for section in engine_sections(values))
        # mpirun spreads ranks without a host over the whole allocation; devices without one are this host's.
        several = counts or len(allocation.hosts) > 1
        home = next(filter(has_own_name, allocation.hosts), allocation.hosts[0]) if several else ""
        filled = fill_counts(spell_hosts(values, allocation.hosts, home), lambda: allocation)
        check_granted(filled, allocation)
    else:
        filled = fill_counts(spell_hosts(values), find_allocation)
    launch = filled.get("launch") or {}
    if isinstance(launch, dict) and launch.get("orchestrator_host") is None:
        hosts = [host_of(device) for devices in list_devices(filled).values() for device in devices]
        local = find_local(host for host in dict.fromkeys(hosts) if host)
        if local is not None:
            filled["launch"] = {**launch, "orchestrator_host": local}
    return filled


def make_run_config(source: Mapping[str, Any], mpi_rank: MpiRank | None = None) -> RuntimeConfig:
    """Check the values as this host sees them: with its own model directories.

    Args:
        source: what rank 0 read: `values`, the directory `base` that relative paths start from, and the file `where`.
        mpi_rank: of this rank.

    Raises:
        ConfigError: one line that names the file and the key, and on ranks other than 0 also rank and host.
    """
    values = {**source["values"]}
    where = source["where"]
    if mpi_rank is not None and mpi_rank.rank > 0:
        where = f"{where}, on rank {mpi_rank.rank} of host {socket.gethostname()}"
    for name in ENGINES:
        section = values.get(name)
        if isinstance(section, dict) and isinstance(section.get("model"), dict):
            model = _own_path(section["model"], f"{where}: {name}.model", mpi_rank)
            values[name] = {**section, "model": model}
    if isinstance(values.get("tokenizer"), dict):
        values["tokenizer"] = _own_path(values["tokenizer"], f"{where}: tokenizer", mpi_rank)
    return make_config(values, base=Path(source["base"]), where=where)


def is_model_here(model: object) -> bool:
    """Whether a value of the configuration is the path of a directory that this process can see, or the name of what
    is in this host's Hugging Face cache."""
    if not isinstance(model, str):
        return False
    try:
        if Path(model).expanduser().is_dir():
            return True
        name = read_hub_name(model)
        return name is not None and find_snapshot(name) is not None
    except (OSError, RuntimeError, ValueError):  # a name that is too long or no file can have, a home of nobody
        return False


def check_started_together(mpi_rank: MpiRank | None, environment: Mapping[str, str]) -> None:
    """Refuse processes that a launcher started together but that MPI will not bring together.

    `srun` gives every process its number, whether or not the MPI library understands srun. Where it does not, each
    process would take itself for the whole job.

    Args:
        mpi_rank: this process's place as mpirun or srun told it.
        environment: of this process.

    Raises:
        PlacementError: with the ways out.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if mpi_rank is None and environment.get("SLURM_STEP_ID", "").isdecimal() and tasks.isdecimal() and int(tasks) > 1:
        raise PlacementError(
            f"srun started {tasks} processes that do not know each other, each a world of its own: start them with "
            "mpirun inside the batch script (launch.slurm.launcher: mpirun), or with srun --mpi=TYPE of this MPI"
        )
    rank = environment.get("PALS_RANKID", "0")
    if mpi_rank is None and rank not in ("", "0"):
        raise PlacementError(
            f"PALS started this process as rank {rank}, but its file ({environment.get('PALS_APINFO')}) does not tell "
            "of how many: start them with mpirun inside the batch script (launch.pbs.launcher: mpirun)"
        )


def check_world_size(mpi_rank: MpiRank, size: int) -> None:
    """Raise PlacementError where MPI sees another world than the launcher started."""
    if size != mpi_rank.size:
        raise PlacementError(
            f"{mpi_rank.size} processes were started together, but MPI sees a world of {size}: this MPI library and "
            "the launcher do not speak the same protocol; start the ranks with the mpirun of this MPI library "
            "(launch.slurm.launcher: mpirun), or with srun --mpi=TYPE of it"
        )


def _share(source: dict[str, Any] | None, mpi_rank: MpiRank) -> dict[str, Any]:
    """Give rank 0's source to every rank. Rank 0 that fails before it comes here ends the job for the others."""
    from mpi4py import MPI

    check_world_size(mpi_rank, MPI.COMM_WORLD.Get_size())
    text = json.dumps(source).encode()
    length = bytearray(len(text).to_bytes(8, sys.byteorder))
    MPI.COMM_WORLD.Bcast((length, MPI.BYTE), 0)
    message = bytearray(text if mpi_rank.rank == 0 else int.from_bytes(length, sys.byteorder))
    MPI.COMM_WORLD.Bcast((message, MPI.BYTE), 0)
    return dict(json.loads(bytes(message)))


def _own_path(paths: Mapping[str, Any], where: str, mpi_rank: MpiRank | None) -> Any:
    """This host's path of a mapping from hosts to paths."""
    host = find_local(host for host in paths if host != DEFAULT_HOST)
    if host is not None:
        return paths[host]
    if DEFAULT_HOST in paths:
        return paths[DEFAULT_HOST]
    if mpi_rank is None:
        # This process only starts the ranks: any host's directory that it can see tells it what the model is.
        for path in paths.values():
            if is_model_here(path):
                return path
    raise ConfigError(
        f"{where}: no path for this host ({socket.gethostname()}): add it beside {', '.join(paths) or 'the others'}, "
        f"or a path under '{DEFAULT_HOST}'"
    )


def engine_sections(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The engines' sections, as far as they are sections."""
    return [section for section in (values.get(name) for name in ENGINES) if isinstance(section, dict)]
