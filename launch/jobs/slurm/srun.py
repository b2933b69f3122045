"""Starting the ranks by srun instead of mpirun: where each one goes, and in which environment.

It makes lines of a batch script. It does not start anything. Only an MPI library that speaks one of srun's protocols
brings ranks together that srun has started; each rank checks that (`run_config.check_started_together`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from launch.jobs.mpi.flavours import When
from launch.jobs.mpi.library import choose_flavour
from launch.jobs.slurm.resources import SlurmResources
from trtrun.errors import ConfigError

PROTOCOLS = {"openmpi4": "pmix", "mpich": "pmi2"}
"""srun's --mpi for each MPI library that it can start the ranks of."""


def prepare_step(resources: SlurmResources) -> Iterator[str]:
    """Lines that come before srun: what mpirun would set, and the node of each rank.

    Raises:
        ConfigError: the ranks' nodes cannot be told before the allocation is there.
    """
    launch = resources.config.launch
    choice = choose_flavour(launch.mpi, os.environ)
    for name, value in {**choice.environment, **launch.environment}.items():
        yield f"export {name}={shlex.quote(value)}"
    for setting in choice.flavour.settings:
        if setting.arguments[0] == "--mca" and setting.when is When.ALWAYS:
            name, value = setting.variables[0], setting.arguments[-1]
            yield f'export {name}="${{{name}:-{value}}}"'
    yield "unset SLURM_NTASKS_PER_NODE # of the job; the nodes need not all have as many ranks"
    if len(resources.hosts) == 1:
        return
    made_up = [host for host in resources.hosts if host not in resources.named]
    if made_up and resources.named:
        raise ConfigError(
            "launch.slurm.launcher: srun needs to know each rank's node, and only "
            f"{', '.join(resources.named)} are named: name all hosts, or count all devices"
        )
    yield "# The node of each rank, in rank order."
    if resources.named:
        names = [shlex.quote(resources.topology.host(rank)) for rank in range(resources.topology.world_size)]
    else:
        yield 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
        places = [resources.hosts.index(resources.topology.host(rank)) for rank in range(resources.topology.world_size)]
        names = [f'"${{nodes[{place}]}}"' for place in places]
    yield 'export SLURM_HOSTFILE="$(mktemp)"'
    yield """trap 'rm -f -- "$SLURM_HOSTFILE"' EXIT"""
    yield f"printf '%s\\n' {' '.join(names)} >\"$SLURM_HOSTFILE\""


def step_words(resources: SlurmResources) -> list[str]:
    """srun and its options.

    Raises:
        ConfigError: srun has no protocol for this MPI library.
    """
    slurm, size = resources.slurm, resources.topology.world_size
    kind = slurm.srun_mpi
    if kind is None:
        flavour = choose_flavour(resources.config.launch.mpi, os.environ).flavour
        kind = PROTOCOLS.get(flavour.name)
        if kind is None:
            raise ConfigError(
                f"launch.slurm.launcher: srun cannot start the ranks of {flavour.title} as pip installs it: take "
                "mpirun; for a build that knows Slurm's PMIx, set launch.slurm.srun_mpi: pmix"
            )
    words = ["srun", f"--mpi={kind}", f"--nodes={len(resources.hosts)}", f"--ntasks={size}"]
    if len(resources.hosts) > 1:
        words.append("--distribution=arbitrary")
    if resources.cpus_per_task is not None:
        words.append(f"--cpus-per-task={resources.cpus_per_task}")
    return [*words, "--cpu-bind=none", "--kill-on-bad-exit=1", "--overcommit"]
