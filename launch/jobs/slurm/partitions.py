"""Which partitions a Slurm cluster has, as sinfo tells. It does not know what a job needs."""

from __future__ import annotations

from dataclasses import dataclass

from launch.jobs.slurm.client import SlurmError, call, describe_failure
from launch.jobs.slurm.section import count_gres_gpus

_FORMAT = "%P|%a|%l|%D|%G"


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind in a partition.

    Attributes:
        name: of the partition.
        is_default: whether jobs that name none go there.
        time_limit: as Slurm writes it.
        num_nodes: of this kind.
        gpus: of each node; 0 for none.
        gres: generic resources of each node, as Slurm writes them; empty for none.
    """

    name: str
    is_default: bool
    time_limit: str
    num_nodes: int
    gpus: int
    gres: str

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'}"
        return f"{self.name} ({nodes}{f' of {self.gres}' if self.gres else ''}, up to {self.time_limit})"


def list_partitions() -> list[Partition]:
    """The partitions that are up, in Slurm's order.

    Raises:
        SlurmError: there is no sinfo, or it fails.
    """
    done = call(["sinfo", "--noheader", f"--format={_FORMAT}"])
    if done.returncode:
        raise SlurmError(f"sinfo failed: {describe_failure(done)}")
    found = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) != 5 or words[1] != "up":
            continue
        name, _, limit, nodes, gres = words
        gres = "" if gres in ("(null)", "N/A") else gres
        count = int(nodes) if nodes.isdecimal() else 0
        gpus = count_gres_gpus(gres) or 0
        found.append(Partition(name.removesuffix("*"), name.endswith("*"), limit, count, gpus, gres))
    return found
