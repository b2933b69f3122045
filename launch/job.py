"""One job, three ways in: started plainly it is mpirun's parent, under mpirun it is a rank, alone it is everything.

It decides which of the three this process is. It does not know what the job computes: the caller goes on when told
that this process has a role.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from launch.devices import count_host_slots, make_topology
from launch.mpirun import Place, build_command, build_environment, find_place, show_command
from launch.supervise import supervise
from parallel.topology import Topology
from trtrun.config import RuntimeConfig
from trtrun.errors import TopologyError
from trtrun.threads import threads_per_slot

_PR_SET_PDEATHSIG = 1
LAST_WORD_SECONDS = 5.0
"""How long a rank other than 0 waits before it tells an error that rank 0 most likely tells too."""


@dataclass(frozen=True)
class Job:
    """A configuration and the command line that every rank gets.

    Attributes:
        config: of the run.
        arguments: command line of `module`.
        module: the Python module that each rank runs.
        nests: under an mpirun of one rank, start an mpirun of the right size inside it instead of refusing.
    """

    config: RuntimeConfig
    arguments: Sequence[str]
    module: str = "launch.cli"
    nests: bool = False
    topology: Topology = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", make_topology(self.config))

    @property
    def threads(self) -> int:
        """CPU threads of each slot."""
        return threads_per_slot(self.config.threads, count_host_slots(self.topology, self.topology.slots[0].host))

    def command(self) -> list[str]:
        """The command that starts the job: mpirun with its flags, or plain Python for a single process."""
        if self.topology.world_size == 1:
            return [sys.executable, "-m", self.module, *self.arguments]
        return build_command(
            self.topology.world_size,
            self.arguments,
            threads=self.threads,
            threads_are_configured=self.config.threads is not None,
            module=self.module,
        )

    def enter(self, check: Callable[[], None]) -> int | None:
        """Find this process's part in the job, and play it if it is only to start and watch mpirun.

        Args:
            check: raises a TrtrunError for what the user got wrong, before any rank is started.

        Returns:
            The exit status when the job has run under this process's eyes; None when this process is to take its role.

        Raises:
            TopologyError: mpirun started another number of ranks than the devices need.
        """
        place = find_place()
        if place is not None and not (self.nests and place.size == 1 < self.topology.world_size):
            self._check_size(place)
            end_with_launcher()
            self._set_threads()
            if place.rank == 0:
                check()
            return None
        if self.topology.world_size == 1:
            self._set_threads()
            check()
            return None
        check()
        return supervise(self.command(), build_environment(), self.topology.describe)

    def _check_size(self, place: Place) -> None:
        if place.size != self.topology.world_size:
            ranks = ", ".join(self.topology.describe(rank) for rank in range(self.topology.world_size))
            raise TopologyError(
                f"the devices need {self.topology.world_size} ranks ({ranks}) but {place.size} were started; "
                f"run: {show_command(self.command())}"
            )

    def _set_threads(self) -> None:
        """OpenMP reads this when torch is imported, so it comes before everything that imports it."""
        if self.config.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.config.threads)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", str(self.threads))


def print_error(line: str) -> None:
    """Say one line to the user; from ranks other than 0 only if rank 0 does not end the job first.

    mpirun ends the job when the first rank exits. If each rank spoke, the user would read the same line many times; if
    a rank exited in silence before rank 0 had spoken, nobody would.
    """
    place = find_place()
    if place is not None and place.rank != 0:
        time.sleep(LAST_WORD_SECONDS)
    print(f"trtrun: {' '.join(line.split())}", file=sys.stderr, flush=True)


def finish_mpi() -> None:
    """End MPI on rank 0 once the ranks are let go: they wait for it, and their waiting burns cores."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()


def is_reporting_rank() -> bool:
    """Whether this process may talk to the user: rank 0, or no rank at all."""
    place = find_place()
    return place is None or place.rank == 0


def end_with_launcher() -> None:
    """End this rank when the mpirun that started it dies, even by SIGKILL.

    Open MPI notices that only while the rank calls into it; a rank that loads or computes would stay behind.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
