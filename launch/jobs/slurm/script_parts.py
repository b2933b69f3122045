"""Parts of a batch script: how srun starts the ranks, and the bash that runs the command, passes signals to it and
keeps its status.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

from launch.exit_codes import ExitCode
from launch.jobs.batch.resources import BatchResources
from launch.jobs.batch.script_parts import go_on, run_draining
from launch.jobs.mpi.flavours import FLAVOURS, Flavour, When
from launch.jobs.mpi.library import choose_flavour
from launch.jobs.slurm.section import SlurmSection
from trtrun.errors import ConfigError

PROTOCOLS = {"openmpi4": "pmix", "mpich": "pmi2"}
"""srun's --mpi for each MPI library that it can start the ranks of."""


def prepare_step(resources: BatchResources) -> Iterator[str]:
    """Lines that come before srun: what mpirun would set, and the node of each rank.

    Raises:
        ConfigError: the ranks' nodes cannot be told before the allocation is there.
    """
    flavour, needed = _choose_mpi(resources)
    for name, value in {**needed, **resources.config.launch.environment}.items():
        yield f"export {name}={shlex.quote(value)}"
    for setting in flavour.settings:
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


def _choose_mpi(resources: BatchResources) -> tuple[Flavour, Mapping[str, str]]:
    """The MPI library of the ranks, and variables that make them load it. An image cannot be asked from here: where
    launch.mpi does not say otherwise it has MPICH, as those of containers/ have."""
    name = resources.config.launch.mpi
    if resources.section_as(SlurmSection).container is not None:
        return FLAVOURS["mpich" if name == "auto" else name], {}
    choice = choose_flavour(name, os.environ)
    return choice.flavour, choice.environment


def step_words(resources: BatchResources) -> list[str]:
    """srun and its options.

    Raises:
        ConfigError: srun has no protocol for this MPI library.
    """
    slurm, size = resources.section_as(SlurmSection), resources.topology.world_size
    kind = slurm.srun_mpi
    if kind is None:
        flavour, _ = _choose_mpi(resources)
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


PLAIN_BODY = """\
# A signal ends the command. It also ends the first `wait`, and the second one takes the command's status.
"${job[@]}" &
child=$!
trap 'kill -s TERM "$child"' TERM
wait "$child" || wait "$child"\
"""

_HEARING = """\
# USR1 is Slurm's warning before the time limit, TERM comes from `trtrun cancel`. Either makes the command drain: it
# begins nothing more, what is in flight has {drain_seconds:g} s, and where something is left the status is {drained}.
child='' heard='' again=yes
hear() {{
    heard=$1 again=yes
    [[ -z $child ]] || kill -s USR1 "$child"
}}
trap 'hear USR1' USR1
trap 'hear TERM' TERM

"""

_REQUEUE = """\
        echo "trtrun: the job goes back into the queue, for the {what} that are left"
        scontrol requeue "$SLURM_JOB_ID" # Slurm ends this script\
"""


def draining_body(drain_seconds: float, finished: tuple[str, str] | None, at_end: str) -> str:
    """Run the command `job` so that a signal drains it.

    Args:
        drain_seconds: that rows in flight have.
        finished: as of `run_draining`.
        at_end: further bash behind the command.
    """
    hearing = _HEARING.format(drain_seconds=drain_seconds, drained=int(ExitCode.DRAINED))
    requeue = go_on(finished, "${SLURM_RESTART_COUNT:-0} + 1", _REQUEUE, "not requeued")
    return f'{hearing}{run_draining(finished)}{requeue}{at_end}exit "$status"'
