"""Which batch system a command talks to, and what belongs to it: programs, section, script.

It looks at the configuration and at PATH. It calls none of the programs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.jobs.batch.job import BatchJob
    from launch.jobs.batch.scheduler import BatchSection, Scheduler

PROGRAMS = {"slurm": "squeue", "pbs": "qstat"}
"""Of each batch system one that is on PATH where it is. Slurm comes first: it may bring wrappers named as PBS's."""


@dataclass(frozen=True)
class BatchSystem:
    """What belongs to a batch system.

    Attributes:
        name: in launch.scheduler.
        scheduler: its programs.
        section_class: what the YAML file says to it.
        render_script: makes the batch script.
    """

    name: str
    scheduler: Scheduler
    section_class: type[BatchSection]
    render_script: Callable[[BatchJob], str]


def find_system(values: Mapping[str, Any] | None = None, name: str | None = None) -> BatchSystem:
    """The batch system of a configuration, or of this machine.

    Args:
        values: what the YAML file holds, None where there is none.
        name: asked for by an option; None to find out.
    """
    launch = (values or {}).get("launch")
    section: Mapping[str, Any] = launch if isinstance(launch, dict) else {}
    name = name or section.get("scheduler", "auto")
    if name not in PROGRAMS:  # what is wrong with another name says the check of the configuration
        named = [known for known in PROGRAMS if section.get(known)]
        there = [known for known, program in PROGRAMS.items() if shutil.which(program)]
        name = named[0] if len(named) == 1 else (there or ["slurm"])[0]
    if name == "pbs":
        from launch.jobs.pbs import client as pbs
        from launch.jobs.pbs.script import render_script as render_pbs_script
        from launch.jobs.pbs.section import PbsSection

        return BatchSystem(name, pbs, PbsSection, render_pbs_script)
    from launch.jobs.slurm import client as slurm
    from launch.jobs.slurm.script import render_script
    from launch.jobs.slurm.section import SlurmSection

    return BatchSystem("slurm", slurm, SlurmSection, render_script)


def check_batch_sections(values: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a YAML file's mapping has a section of a batch system that is wrong.

    Args:
        values: the whole file.
        where: what to call it in messages.
    """
    from launch.jobs.pbs.section import PbsSection
    from launch.jobs.slurm.section import SlurmSection
    from trtrun.configuration.engine_sections import check_section

    launch = values.get("launch")
    for name, section_class in (("slurm", SlurmSection), ("pbs", PbsSection)):
        if isinstance(launch, dict) and name in launch:
            check_section(section_class, launch[name], where, ("launch", name))
