"""Hosts that do not exist yet: where `trtrun plan` puts a job whose counted devices need more than this host has.

They are those that `trtrun submit` reckons with (launch/jobs/slurm/resources.py), so that the plan of a batch job is
what the job does. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.jobs.placement.allocation import in_allocation
from launch.jobs.placement.devices import ENGINES
from launch.jobs.placement.run_config import make_run_config, name_places
from launch.jobs.slurm.resources import SlurmResources, read_resources
from launch.jobs.slurm.section import check_slurm_section
from trtrun.configuration.config import RuntimeConfig, read_values
from trtrun.configuration.device_lists import is_counts
from trtrun.errors import ConfigError


def load_plan_config(path: Path, overrides: Sequence[str]) -> tuple[RuntimeConfig, tuple[str, ...]]:
    """The configuration of a job that is not started; its hosts are simulated where counts ask for more than is here.

    Returns:
        The configuration, and the names of the simulated hosts; none where all hosts are real.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    values = read_values(path, overrides)
    check_slurm_section(values, str(path))
    try:
        return _make(name_places(values), path), ()
    except ConfigError as error:
        if in_allocation() or not _counts_devices(values):
            raise ConfigError(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}") from None
    return place_on_simulated_hosts(path, overrides, read_resources(path, overrides))


def place_on_simulated_hosts(
    path: Path, overrides: Sequence[str], resources: SlurmResources
) -> tuple[RuntimeConfig, tuple[str, ...]]:
    """The configuration with its devices where a batch job will have them; otherwise like `load_plan_config`."""
    values = read_values(path, overrides)
    placed = {
        "target": {**values["target"], "devices": list(resources.config.target.devices)},
        "launch": {**(values.get("launch") or {}), "orchestrator_host": resources.config.launch.orchestrator_host},
    }
    if resources.config.draft_devices:
        placed["draft"] = {**values["draft"], "devices": list(resources.config.draft_devices)}
    return _make({**values, **placed}, path), tuple(host for host in resources.hosts if host not in resources.named)


def _make(values: Mapping[str, Any], path: Path) -> RuntimeConfig:
    return make_run_config({"values": values, "base": str(path.resolve().parent), "where": str(path)})


def _counts_devices(values: Mapping[str, Any]) -> bool:
    sections = [values.get(name) for name in ENGINES]
    return any(isinstance(section, dict) and is_counts(section.get("devices")) for section in sections)
