"""The section of the YAML file that says how a job is started: MPI, hosts, time limits.

It knows names, types and ranges. What they lead to is the launch package's business, and so is Slurm.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trtrun.configuration.device_lists import check_host
from trtrun.errors import shorten


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())

    @classmethod
    def known_keys(cls) -> list[str]:
        """Keys that may stand in the section, for messages."""
        return list(cls.model_fields)


def _refuse_bool(value: object) -> object:
    """YAML's true and false are no numbers, though Python's are."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Number = BeforeValidator(_refuse_bool)
"""A number that is not written as true or false."""


def _check_path(value: object) -> object:
    """What no file system takes, and a text without a name, which would mean the folder of the file."""
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError(f"must be the path of a file or directory, not {shorten(value)}")
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            raise ValueError(f"{shorten(value)} holds half a character, which no path can") from None
    return value


FilePath = Annotated[Path, BeforeValidator(_check_path)]


def _check_line(value: str) -> str:
    """One line of printable text: such values become words of command lines and lines of scripts."""
    if not value or not value.isprintable():
        raise ValueError(f"{shorten(value)} must be one line of text")
    return value


def _check_environment(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{shorten(name)} is no name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a zero byte, which no environment can")
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            raise ValueError(f"the value of {name} holds half a character, which no environment can") from None
    return values


def _environment_text(values: object) -> object:
    """Numbers become text. YAML's true and false do not: what a program wants to read instead is not known."""
    if not isinstance(values, dict):
        raise ValueError("must be a mapping, such as {NCCL_IB_HCA: mlx5}")
    return {
        name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in values.items()
    }


def _refuse_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(
            f'must be a list with each word by itself, such as ["-F", "cluster.conf"], not {shorten(value)}'
        )
    return value


Line = Annotated[str, AfterValidator(_check_line)]
Lines = Annotated[tuple[Line, ...], BeforeValidator(_refuse_text)]
Host = Annotated[str, AfterValidator(check_host)]
Seconds = Annotated[float, Number, Field(gt=0, le=86400)]
Environment = Annotated[dict[str, str], BeforeValidator(_environment_text), AfterValidator(_check_environment)]


class LaunchSection(Section):
    """How the ranks are started, watched and ended.

    Attributes:
        mpi: whose flags mpirun gets: `openmpi` is Open MPI 5, `openmpi4` Open MPI 4; `auto` asks the mpi4py in use.
        mpirun: the mpirun to call. Left out: the one that belongs to the MPI library.
        mpirun_arguments: further arguments of mpirun, behind trtrun's own.
        ssh_arguments: arguments of ssh where hosts are reached by it, such as `["-F", "cluster.conf"]`.
        environment: variables for every rank. Values reach the ranks through mpirun's environment, never through a
            command line that others can read.
        orchestrator_host: the host of rank 0, one that has a device. Left out: the host where the job is started, where
            it has a device, else the target's first.
        start_seconds: from the first rank's start to the first round: meeting, weights, warm-up.
        check_seconds: for `trtrun check`, and for the short check before every run.
        heartbeat_seconds: a rank that is silent for longer, or a round in which no rank gets on for longer, ends the
            job. Steps of a training run have ten times as long to get on.
        adapter_seconds: a rank that loads an adapter, and of which no part comes for longer, ends the job.
        on_draft_loss: whether the job goes on without drafts when it loses a draft rank, where the draft has devices of
            its own and MPI can do that, or ends.
        drain_seconds: how long rows in flight may go on after a signal to end.
        log_directory: one log file for each rank goes there, on the rank's host.
        slurm: for batch jobs. The commands of `trtrun` read it; the Python API carries it unread.
    """

    mpi: Literal["auto", "openmpi", "openmpi4", "mpich"] = "auto"
    mpirun: FilePath | None = None
    mpirun_arguments: Lines = ()
    ssh_arguments: Lines = ()
    environment: Environment = Field(default_factory=dict)
    orchestrator_host: Host | None = None
    start_seconds: Seconds = 600.0
    check_seconds: Seconds = 60.0
    heartbeat_seconds: Seconds = 60.0
    adapter_seconds: Seconds = 300.0
    on_draft_loss: Literal["continue", "end"] = "continue"
    drain_seconds: Seconds = 30.0
    log_directory: FilePath | None = None
    slurm: dict[str, Any] = Field(default_factory=dict)
