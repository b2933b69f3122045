"""One job, three ways in: started plainly it is mpirun's parent, under mpirun it is a rank, alone it is everything.

It decides which of the three this process is. It does not know what the job computes: the caller goes on when told
that this process has a role.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from launch.jobs.mpi.drain import CONTROL_VARIABLE
from launch.jobs.mpi.flavours import Flavour
from launch.jobs.mpi.host_folders import has_room, own_shared_memory, remove_stale_folders
from launch.jobs.mpi.hosts import check_hosts, is_placed, may_be_elsewhere, remote_hosts, uses_ssh
from launch.jobs.mpi.library import choose_flavour
from launch.jobs.mpi.mpirun import (
    Launch,
    build_command,
    build_environment,
    forwarded_names,
    rank_program,
    show_command,
    ssh_arguments,
)
from launch.jobs.mpi.output_filter import OutputFilter, RankEnds
from launch.jobs.mpi.processes import end_with_parent
from launch.jobs.mpi.start_progress import STARTED, StartWatch, say_hello
from launch.jobs.mpi.start_progress import VARIABLE as STEPS_VARIABLE
from launch.jobs.mpi.supervise import STUCK_GRACE_SECONDS, supervise
from launch.jobs.placement.devices import count_host_slots
from parallel import abort
from parallel.mpi_rank import MpiRank, find_mpi_rank
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.environment import settle
from trtrun.errors import PlacementError
from trtrun.rounds.failures import expendable_hosts, expendable_ranks
from trtrun.threads import threads_per_slot

if TYPE_CHECKING:
    from trtrun.start.job_spec import JobSpec

OWN_PREFIX = "TRTRUN_"
"""Of variables by which a parent tells its ranks something."""

LAST_WORD_SECONDS = 5.0
"""How long a rank other than 0 waits before it tells an error that rank 0 most likely tells too."""


@dataclass(frozen=True)
class Job:
    """A configuration and the command line that every rank gets.

    Attributes:
        config: of the run.
        topology: of the ranks that are started.
        arguments: command line of `module`.
        module: the Python module that each rank runs.
        nests: under an mpirun of one rank, start an mpirun of the right size inside it instead of refusing.
        drains: the ranks can be asked to end early (see drain.py); else a signal ends them at once.
        is_check: the ranks only check themselves, and have launch.check_seconds for it.
    """

    config: RuntimeConfig
    arguments: Sequence[str]
    module: str = "launch.cli"
    nests: bool = False
    drains: bool = False
    is_check: bool = False
    topology: Topology = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", make_topology(self.config))

    @cached_property
    def spec(self) -> JobSpec:
        """The configuration, its topology and its models."""
        from trtrun.start.job_spec import JobSpec  # what it takes to read models is not imported before

        return JobSpec(self.config)

    @property
    def threads(self) -> int:
        """CPU threads of each slot, as this host has cores."""
        return self._threads_on(self.topology.slots[0].host)

    @property
    def needs_mpirun(self) -> bool:
        """Whether the job is more than this process can be."""
        return self.topology.world_size > 1 or is_placed(self.topology)

    def _is_on_this_host(self, flavour: Flavour, environment: Mapping[str, str]) -> bool:
        """Whether mpirun and all ranks are on this host. Two names of it are two hosts for an MPI library."""
        if len(self.topology.hosts) > 1 or any(True for _ in remote_hosts(self.topology)):
            return False
        return not may_be_elsewhere(flavour, self.config.launch, environment)

    def command(self) -> list[str]:
        """The command that starts the job from a shell: mpirun with its flags, or plain Python for a single process."""
        if not self.needs_mpirun:
            return [sys.executable, "-m", self.module, *self.arguments]
        own = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
        return self._build(self._launch(own))

    def describe_lost_survival(self) -> str | None:
        """That a lost draft rank ends the job for its MPI's sake alone, as a sentence; None where it does not."""
        if not self.needs_mpirun or not expendable_ranks(self.config, self.topology):
            return None
        library = self._launch(os.environ).choice.library
        if library.outlives_ranks:
            return None
        return f"a lost draft rank ends the job, for {library.version} ends with any rank: Open MPI 5 would go on"

    def _launch(self, environment: Mapping[str, str]) -> Launch:
        """How the ranks are started, by an mpirun in the environment."""
        section = self.config.launch
        placed = is_placed(self.topology)
        choice = choose_flavour(section.mpi, {**environment, **section.environment})
        by_ssh = placed and uses_ssh(choice.flavour, section, environment)
        outlives = choice.library.outlives_ranks
        may_lose = outlives and bool(expendable_ranks(self.config, self.topology))
        may_lose_hosts = outlives and bool(expendable_hosts(self.config, self.topology))
        shared = choice.flavour.shared_memory
        stays_here = self._is_on_this_host(choice.flavour, {**environment, **section.environment})
        shares_memory = stays_here and has_room(shared, environment, self.topology.world_size)
        return Launch(
            self.topology,
            section,
            environment,
            choice,
            placed,
            by_ssh,
            may_lose,
            may_lose_hosts,
            stays_here,
            shares_memory,
        )

    def _build(self, launch: Launch) -> list[str]:
        """The command of mpirun."""
        threads: int | None = self.config.threads
        if threads is None and not launch.is_placed and "OMP_NUM_THREADS" not in launch.environment:
            threads = self.threads  # other hosts have other numbers of cores: their ranks look for themselves
        return build_command(launch, rank_program(self.module, self.arguments), threads)

    def _supervise(self) -> int:
        """Start the ranks and watch them; returns their exit status."""
        section = self.config.launch
        environment = build_environment(added=section.environment)
        told = {STEPS_VARIABLE: "1", **({CONTROL_VARIABLE: "stdin"} if self.drains else {})}
        launch = self._launch({**environment, **told})
        command = self._build(launch)
        if launch.uses_ssh:
            forwarded = {name: launch.environment[name] for name in forwarded_names(launch)}
            hosts = list(remote_hosts(self.topology))
            check_hosts(hosts, ssh_arguments(launch), {**forwarded, **launch.choice.environment})
        drain_seconds = section.drain_seconds if self.drains else None
        remove_stale_folders(environment)
        if launch.may_lose_ranks:
            environment |= launch.choice.flavour.tells
        output = OutputFilter(self.topology.describe, ends=RankEnds() if launch.may_lose_ranks else None)
        # A folder of this host is none of the others.
        variable = "" if launch.is_placed else launch.choice.flavour.shared_memory
        with own_shared_memory(variable, environment) as added:
            values, steps = environment | added, self._watch_steps()
            stays_here = self._is_on_this_host(launch.choice.flavour, environment)
            status = supervise(command, values, output, drain_seconds, steps, stays_here)
        remove_stale_folders(environment)  # of an mpirun that was killed
        return status

    def enter(self, check: Callable[[], None]) -> int | None:
        """Find this process's part in the job, and play it if it is only to start and watch mpirun.

        Args:
            check: raises a TrtrunError for what the user got wrong, before any rank is started.

        Returns:
            The exit status when the job has run under this process's eyes; None when this process is to take its role.

        Raises:
            PlacementError: mpirun started another number of ranks than the devices need, there is no mpirun, or a host
                cannot be reached.
        """
        mpi_rank = find_mpi_rank()
        if mpi_rank is not None:
            say_hello()
        if mpi_rank is not None and not (self.nests and mpi_rank.size == 1 < self.topology.world_size):
            self._check_size(mpi_rank)
            # With mpirun: Open MPI notices its end only while a rank calls into it, not while one loads or computes.
            end_with_parent()
            self._set_environment(mpi_rank)
            if mpi_rank.rank == 0:
                check()
            return None
        if not self.needs_mpirun:
            self._set_environment(MpiRank(0, 1))
            check()
            return None
        check()
        return self._supervise()

    def _watch_steps(self) -> StartWatch:
        """Who names the ranks that are stuck before they work."""
        launch = self.config.launch
        if self.is_check:
            # The end of the job comes out of the same time.
            seconds = max(launch.check_seconds / 2, launch.check_seconds - STUCK_GRACE_SECONDS - 2)
            return StartWatch(self.topology.describe, self.topology.world_size, seconds, "the check", STARTED)
        return StartWatch(self.topology.describe, self.topology.world_size, launch.start_seconds, "the start")

    def _check_size(self, mpi_rank: MpiRank) -> None:
        if mpi_rank.size != self.topology.world_size:
            ranks = ", ".join(self.topology.describe(rank) for rank in range(self.topology.world_size))
            raise PlacementError(
                f"the devices need {self.topology.world_size} ranks ({ranks}) but {mpi_rank.size} were started; "
                f"run: {show_command(self.command())}"
            )

    def _threads_on(self, host: str) -> int:
        """CPU threads of each slot of a host, when called there."""
        return threads_per_slot(self.config.threads, count_host_slots(self.topology, host))

    def _set_environment(self, mpi_rank: MpiRank) -> None:
        """What the configuration sets, for ranks that a user's own mpirun started; and the threads.

        OpenMP reads its own when torch is imported, so this comes before everything that imports it.
        """
        os.environ.update(self.config.launch.environment)
        settle(os.environ)
        if self.config.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.config.threads)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", str(self._threads_on(self.topology.host(mpi_rank.rank))))


def print_error(line: str) -> None:
    """Say one line to the user; from ranks other than 0 only if rank 0 does not end the job first.

    mpirun ends the job when the first rank exits. If each rank spoke, the user would read the same line many times; if
    a rank exited in silence before rank 0 had spoken, nobody would.
    """
    mpi_rank = find_mpi_rank()
    if mpi_rank is not None and mpi_rank.rank != 0:
        join_world()
        time.sleep(LAST_WORD_SECONDS)
    print(f"trtrun: {' '.join(line.split())}", file=sys.stderr, flush=True)


def join_world() -> None:
    """Start MPI in a rank that is to end because of an error, if it has not started it yet.

    mpirun kills the other ranks when one fails. If one of them is just connecting to it, Open MPI's mpirun (5.0.11,
    OpenPMIx's connection handler) crashes, or never ends. All ranks get through MPI's start together, and then none is
    connecting. If another one never comes, this process ends with abort.STATUS after abort.ABORT_SECONDS.
    """
    mpi_rank = find_mpi_rank()
    is_openmpi = {"OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"} <= os.environ.keys()  # the latter: started by its mpirun
    if mpi_rank is None or mpi_rank.size == 1 or "mpi4py.MPI" in sys.modules or not is_openmpi:
        return
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(abort.ABORT_SECONDS, exit=True, file=nowhere)
        import mpi4py.MPI  # noqa: F401 (starts MPI)

        faulthandler.cancel_dump_traceback_later()


def finish_mpi() -> None:
    """End MPI on rank 0 once the ranks are let go: they wait for it, and their waiting burns cores."""
    if abort.passes_by_mpi():
        return
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()


def is_reporting_rank() -> bool:
    """Whether this process may talk to the user: rank 0, or no rank at all."""
    mpi_rank = find_mpi_rank()
    return mpi_rank is None or mpi_rank.rank == 0
