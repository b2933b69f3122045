"""The `launch.slurm` section of the YAML file: names, types and ranges of what a batch job asks for.

The runtime keeps the section unread; the commands of `trtrun` check it here. It does not know what the values lead to.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from launch.jobs.batch.scheduler import GpuRequest
from launch.jobs.placement.allocation import MOST_HOSTS
from trtrun.configuration.process_sections import Environment, Line, Lines, Number, Section
from trtrun.errors import shorten


def _number_to_text(value: object) -> object:
    """A plain number is minutes to Slurm, which takes texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _check_binds(binds: tuple[str, ...]) -> tuple[str, ...]:
    """Paths that every runtime reads alike: commas and further colons would be taken for another bind."""
    for bind in binds:
        parts = bind.split(":")
        is_right = len(parts) <= 3 and all(part.startswith("/") for part in parts[:2]) and parts[2:] in ([], ["ro"])
        if not is_right or "," in bind:
            raise ValueError(f"{shorten(bind)} must be /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro, without commas")
    return binds


class ContainerSection(Section):
    """The image that all processes of a batch job run in; its `python3` has trtrun.

    Attributes:
        image: a file or what the runtime imports; for `ce` the EDF file, or its name.
        runtime: what starts it; `ce` is the Container Engine of CSCS.
        binds: folders of the host: `/SOURCE`, `/SOURCE:/TARGET` or `/SOURCE:/TARGET:ro`.
        env: variables inside. For `ce` these and binds stand in the EDF file.
    """

    image: Line
    runtime: Literal["apptainer", "singularity", "pyxis", "ce"] = "apptainer"
    binds: Annotated[Lines, AfterValidator(_check_binds)] = ()
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_edf(self) -> ContainerSection:
        given = [name for name, value in (("binds", self.binds), ("env", self.env)) if value]
        if self.runtime == "ce" and given:
            raise ValueError(f"{' and '.join(given)} of the runtime ce stand in the EDF file {shorten(self.image)}")
        return self


def count_gres_gpus(gres: str | None) -> int | None:
    """GPUs in a value of sbatch's --gres, such as "gpu:a100:4,shard:1"; None where it names no GPU."""
    if gres is None:
        return None
    counts = [
        int(match[1] or 1)
        for item in gres.split(",")
        if (match := re.fullmatch(r"(?:gres[:/])?gpu(?::[A-Za-z_][\w.-]*)?(?::([0-9]{1,4}))?(?:\(.*\))?", item.strip()))
    ]
    return sum(counts) if counts else None


class SlurmSection(Section):
    """What `trtrun submit` writes into the batch script. What is left out is the cluster's own default.

    Attributes:
        partition, account, qos, constraint, reservation, nodelist: sbatch's option of the same name.
        time: time limit as sbatch takes it, such as `2:00:00`, `2-12:00:00` or minutes.
        job_name: the job's name.
        nodes: nodes to ask for. Left out: what the devices need.
        cpus_per_task: CPU cores of each rank. Left out: `threads`, where that is set, at least 2 for a GPU; else the
            cluster's default, most often 1.
        memory: memory of each node, such as `64G`.
        gres: generic resources of each node, such as `gpu:a100:4`. Left out: the GPUs that the devices need.
        exclusive: take whole nodes.
        output: the log's path; `%j` is the job's number, `%A` and `%a` an array's and its task's.
        setup: shell lines to run first on the first node, such as `module load cuda`.
        launcher: what starts the ranks inside the job.
        srun_mpi: value of srun's `--mpi` where the launcher is srun.
        container: an image for all of the job.
        requeue: put the job back into the queue when it was drained before it was done.
        signal_seconds: how long before the time limit Slurm warns the job, so that it drains.
        chain_lead_seconds: how long before the time limit the next job of a chain (`--chain`) begins: to wait in the
            queue and to load.
        extra: further sbatch options as they stand, such as `--mail-type=END`.
    """

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    nodelist: Line | None = None
    time: Annotated[Line, BeforeValidator(_number_to_text)] | None = None
    job_name: Line = "trtrun"
    nodes: Annotated[int, Number, Field(ge=1, le=MOST_HOSTS)] | None = None
    cpus_per_task: Annotated[int, Number, Field(ge=1, le=65536)] | None = None
    memory: Annotated[Line, BeforeValidator(_number_to_text)] | None = None
    gres: Line | None = None
    exclusive: bool = False
    output: Line = "trtrun-%j.log"
    setup: Lines = ()
    launcher: Literal["mpirun", "srun"] = "mpirun"
    srun_mpi: Line | None = None
    container: ContainerSection | None = None
    requeue: bool = False
    signal_seconds: Annotated[int, Number, Field(ge=1, le=65535)] = 120
    chain_lead_seconds: Annotated[int, Number, Field(ge=1, le=2**31)] = 1800
    extra: Lines = ()

    place_in_file: ClassVar[str] = "launch.slurm"

    @property
    def gpu_request(self) -> GpuRequest | None:
        """GPUs of each node that `gres` asks for; None where it names none."""
        count = count_gres_gpus(self.gres)
        return None if self.gres is None or count is None else GpuRequest("gres", self.gres, count, "gpu:{}")

    @property
    def takes_whole_nodes(self) -> bool:
        """Whether no other job runs on the nodes."""
        return self.exclusive
