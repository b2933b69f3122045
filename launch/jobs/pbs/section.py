"""The `launch.pbs` section of the YAML file: names, types and ranges of what a batch job of PBS asks for.

The runtime keeps the section unread; the commands of `trtrun` check it here. It does not know what the values lead to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from launch.jobs.batch.scheduler import GpuRequest
from launch.jobs.placement.allocation import MOST_HOSTS
from trtrun.configuration.process_sections import Line, Lines, Number, Section
from trtrun.errors import shorten

_WALLTIME = re.compile(r"([0-9]{1,6}):([0-9]{1,2}):([0-9]{1,2})")


def _check_walltime(value: object) -> object:
    if not isinstance(value, str) or not _WALLTIME.fullmatch(value):
        raise ValueError(f'{shorten(value)} is no walltime: write "hours:minutes:seconds", such as 2:00:00')
    return value


def _check(pattern: str, what: str) -> Callable[[str], str]:
    """Make a check that lets texts of a pattern through, and says of others what they are not."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{shorten(value)} is no {what}")
        return value

    return check


_NAME = AfterValidator(_check(r"[A-Za-z0-9][\w+.-]{0,229}", "name of a job of PBS: letters, numbers and - _ + ."))
_SIZE = AfterValidator(_check(r"[0-9]+[kmgtpKMGTP]?[bwBW]?", "size: write such as 64gb"))
_WORD = AfterValidator(_check(r"[A-Za-z][\w.-]*", "name of a resource"))
_check_resource = _check(r"[A-Za-z][\w.-]*=[^\s:+]+", "resource of a node: write such as system=polaris")
_RESOURCES = AfterValidator(lambda values: tuple(map(_check_resource, values)))


class PbsSection(Section):
    """What `trtrun submit` writes into the batch script for PBS. What is left out is the cluster's own default.

    Attributes:
        queue, account, project: qsub's `-q`, `-A` and `-P`.
        walltime: time limit, such as `2:00:00`. Without it nothing warns the job before its end.
        filesystems: those that the job needs, such as `home:eagle`, where a cluster asks for that.
        job_name: the job's name, without spaces.
        nodes: nodes to ask for. Left out: what the devices need.
        cpus_per_task: CPU cores of each rank. Left out: `threads`, where that is set, at least 2 for a GPU; else 1.
        memory: memory of each node, such as `64gb`.
        gpu_resource: what the cluster calls the number of GPUs of a node.
        resources: more of each node, such as `system=polaris`; what is asked for anyway is replaced by its name.
        place: how nodes are chosen and shared, such as `scatter:excl`.
        output: the log's path; `^array_index^` is the number of an array's task. Left out: as PBS names it, by the
            job's name and number.
        setup: shell lines to run first on the first node. PBS starts jobs with the environment of a new login.
        launcher: what starts the ranks inside the job; `pals` is the mpiexec of HPE's PALS.
        launcher_arguments: further arguments of PALS's mpiexec.
        requeue: submit the job again when it was drained before it was done.
        signal_seconds: how long before the walltime the job begins to drain.
        extra: further options of qsub as they stand, such as `-m e`.
    """

    queue: Line | None = None
    account: Line | None = None
    project: Line | None = None
    walltime: Annotated[Line, BeforeValidator(_check_walltime)] | None = None
    filesystems: Line | None = None
    job_name: Annotated[str, _NAME] = "trtrun"
    nodes: Annotated[int, Number, Field(ge=1, le=MOST_HOSTS)] | None = None
    cpus_per_task: Annotated[int, Number, Field(ge=1, le=65536)] | None = None
    memory: Annotated[str, _SIZE] | None = None
    gpu_resource: Annotated[str, _WORD] = "ngpus"
    resources: Annotated[Lines, _RESOURCES] = ()
    place: Line = "scatter"
    output: Line | None = None
    setup: Lines = ()
    launcher: Literal["mpirun", "pals"] = "mpirun"
    launcher_arguments: Lines = ()
    requeue: bool = False
    signal_seconds: Annotated[int, Number, Field(ge=1, le=65535)] = 120
    extra: Lines = ()

    place_in_file: ClassVar[str] = "launch.pbs"

    @property
    def gpu_request(self) -> GpuRequest | None:
        """GPUs of each node that `resources` asks for; None where it names none."""
        for text in self.resources:
            name, _, count = text.partition("=")
            if name == self.gpu_resource and count.isdecimal():
                return GpuRequest("resources", text, int(count), f"{name}={{}}")
        return None

    @property
    def takes_whole_nodes(self) -> bool:
        """Whether no other job runs on the nodes."""
        return "excl" in self.place

    @property
    def seconds(self) -> int | None:
        """The walltime; None where the queue's holds."""
        match = _WALLTIME.fullmatch(self.walltime or "")
        return None if match is None else (int(match[1]) * 60 + int(match[2])) * 60 + int(match[3])
