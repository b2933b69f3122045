"""The configuration of a run, the same on every rank: rank 0 reads the file, fills in the allocation and hands it on.

A shared file system is not needed for it: other ranks never open the file. Model directories may differ from host to
host (`model: {node1: PATH, default: PATH}`); each rank takes its own. It does not know what the sections mean.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.allocation import find_allocation, is_local
from launch.devices import fill_counts, make_topology
from launch.mpirun import Place, find_place
from trtrun.config import RuntimeConfig, make_config, read_values
from trtrun.device_lists import host_of, is_counts, parse_devices
from trtrun.errors import ConfigError, TopologyError

DEFAULT_HOST = "default"


def load_run_config(path: Path, overrides: Sequence[str]) -> RuntimeConfig:
    """Return the configuration of this run: read here, or from rank 0 where mpirun started several ranks.

    Collective under mpirun, and the first use of MPI there.

    Raises:
        ConfigError: one line that names the file and the key.
        TopologyError: the ranks do not see each other (see `check_started_together`).
    """
    place = find_place()
    check_started_together(place, os.environ)
    source: dict[str, Any] | None = None
    if place is None or place.rank == 0:
        values = name_places(read_values(path, overrides))
        source = {"values": values, "base": str(path.resolve().parent), "where": str(path)}
    if place is not None and place.size > 1:
        if source is not None:
            # What is wrong is said before MPI starts, and at once; so is a wrong number of ranks, by whoever asked.
            config = make_run_config(source)
            if make_topology(config).world_size != place.size:
                return config
        source = _share(source, place)
    assert source is not None
    return make_run_config(source)


def name_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what only the starting host knows: the allocation's devices, and the orchestrator's host."""
    filled = fill_counts(values, find_allocation)
    launch = filled.get("launch") or {}
    if isinstance(launch, dict) and launch.get("orchestrator_host") is None:
        local = next((host for host in _hosts(filled) if host and is_local(host)), None)
        if local is not None:
            filled["launch"] = {**launch, "orchestrator_host": local}
    return filled


def make_run_config(source: Mapping[str, Any]) -> RuntimeConfig:
    """Check the values as this host sees them: with its own model directories."""
    values = {**source["values"]}
    for name in ("target", "draft"):
        section = values.get(name)
        if isinstance(section, dict) and isinstance(section.get("model"), dict):
            values[name] = {**section, "model": _own_path(section["model"], f"{source['where']}: {name}.model")}
    return make_config(values, base=Path(source["base"]), where=source["where"])


def check_started_together(place: Place | None, environment: Mapping[str, str]) -> None:
    """Refuse processes that a launcher started together but that MPI will not bring together.

    `srun` gives every process its number, whether or not the MPI library understands srun. Where it does not, each
    process would take itself for the whole job.

    Args:
        place: this process's place as mpirun or srun told it.
        environment: of this process.

    Raises:
        TopologyError: with the ways out.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if place is None and environment.get("SLURM_STEP_ID", "").isdecimal() and tasks.isdecimal() and int(tasks) > 1:
        raise TopologyError(
            f"srun started {tasks} processes that do not know each other, each a world of its own: start them with "
            "mpirun inside the batch script (launch.slurm.launcher: mpirun), or with srun --mpi=TYPE of this MPI"
        )


def check_world_size(place: Place, size: int) -> None:
    """Raise TopologyError where MPI sees another world than the launcher started."""
    if size != place.size:
        raise TopologyError(
            f"{place.size} processes were started together, but MPI sees a world of {size}: this MPI library and the "
            "launcher do not speak the same protocol; start the ranks with the mpirun of this MPI library "
            "(launch.slurm.launcher: mpirun), or with srun --mpi=TYPE of it"
        )


def _share(source: dict[str, Any] | None, place: Place) -> dict[str, Any]:
    """Give rank 0's source to every rank. Rank 0 that fails before it comes here ends the job for the others."""
    from mpi4py import MPI

    check_world_size(place, MPI.COMM_WORLD.Get_size())
    text = json.dumps(source, default=str).encode()
    length = bytearray(len(text).to_bytes(8, sys.byteorder))
    MPI.COMM_WORLD.Bcast((length, MPI.BYTE), 0)
    message = bytearray(text if place.rank == 0 else int.from_bytes(length, sys.byteorder))
    MPI.COMM_WORLD.Bcast((message, MPI.BYTE), 0)
    return dict(json.loads(bytes(message)))


def _own_path(paths: Mapping[str, Any], where: str) -> Any:
    """This host's path of a mapping from hosts to paths."""
    for host, path in paths.items():
        if host != DEFAULT_HOST and is_local(host):
            return path
    if DEFAULT_HOST not in paths:
        raise ConfigError(
            f"{where}: no path for this host ({os.uname().nodename}): add it beside {', '.join(paths)}, "
            f"or a path under '{DEFAULT_HOST}'"
        )
    return paths[DEFAULT_HOST]


def _hosts(values: Mapping[str, Any]) -> list[str]:
    """Hosts of all devices, the target's first; what is wrong with them is found out later."""
    hosts: list[str] = []
    for name in ("target", "draft"):
        section = values.get(name)
        devices = section.get("devices") if isinstance(section, dict) else None
        if devices is None or is_counts(devices):
            continue
        try:
            hosts += [host_of(device) for device in parse_devices(devices)]
        except ValueError:
            continue
    return list(dict.fromkeys(hosts))
