"""What `trtrun init` finds on this host: GPUs, cores, the MPI library, and the partitions of a Slurm cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from launch.jobs.check.preflight import count_gpus
from launch.jobs.mpi.library import find_library
from launch.jobs.slurm.client import Partition, SlurmError, list_partitions
from trtrun.errors import PlacementError
from trtrun.kvcache.sizing import format_bytes
from trtrun.threads import count_cores


@dataclass(frozen=True)
class Machine:
    """This host.

    Attributes:
        gpus: what each GPU is, as texts.
        partitions: of the Slurm cluster that the host belongs to; empty without one.
        slurm: why there are none; empty where there are some.
        mpi: the library that ranks load, or why there is none.
    """

    gpus: tuple[str, ...]
    partitions: tuple[Partition, ...]
    slurm: str
    mpi: str

    @property
    def partition(self) -> Partition | None:
        """Where a job goes from a host without GPUs: the first partition with some, the default one before others."""
        if self.gpus:
            return None
        with_gpus = [found for found in self.partitions if found.gpus]
        return next((found for found in with_gpus if found.is_default), next(iter(with_gpus), None))

    @property
    def num_gpus(self) -> int:
        """GPUs that a job may use on one host."""
        return self.partition.gpus if self.partition is not None else len(self.gpus)

    def describe(self) -> Iterator[str]:
        """Lines for people."""
        yield f"GPUs here: {_count_alike(self.gpus) or 'none'}."
        yield f"CPU cores: {count_cores()}."
        yield f"Slurm: {', '.join(map(str, self.partitions)) or self.slurm}."
        yield f"MPI: {self.mpi}."


def look() -> Machine:
    """This host, as this process sees it."""
    partitions: tuple[Partition, ...] = ()
    try:
        partitions, slurm = tuple(list_partitions()), "no partition is up"
    except SlurmError as error:
        slurm = str(error).partition(":")[0]
    try:
        mpi = find_library(os.environ).version.strip()
    except PlacementError as error:
        mpi = str(error)
    return Machine(tuple(map(_describe_gpu, range(count_gpus()))), partitions, slurm, mpi)


def _describe_gpu(number: int) -> str:
    seen = torch.cuda.get_device_properties(number)
    return f"{seen.name} ({format_bytes(seen.total_memory)})"


def _count_alike(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
