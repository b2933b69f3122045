"""Makes pytest under mpirun honest: a failure on any one rank ends the whole command, non-zero and soon.

Every rank runs the same tests (`mpirun -n N python -m pytest --with-mpi -m mpi tests/ranks`). Rank 0 reports. A rank on
which a test fails prints its report and aborts the job, since its peers may be waiting for it inside MPI. A test that
hangs is ended by a watchdog on each rank. After each test the ranks compare outcomes, so that none runs ahead and none
skips alone. test_failing_rank.py proves all this.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from meeting import from_rank_0, meet

if TYPE_CHECKING:
    from mpi4py import MPI

    from parallel.communicator import Communicator

DEFAULT_TIMEOUT_S = 60.0


class RankHarness:
    """The pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self._comm = MPI.COMM_WORLD.Dup()
        self._config = config
        self._outcomes: list[str] = []
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            self._stderr = os.dup(2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Let rank 0 alone report: pytest's own report of the other ranks goes nowhere."""
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if self._comm.rank != 0 and reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends

    def _abort(self, text: str) -> NoReturn:
        """Print `text` under this rank's name and end the job."""
        tally = self._config.pluginmanager.getplugin("tally")
        if tally is not None:
            tally.counts["failed"] = max(1, tally.counts["failed"])
            tally.write()
        header = f"\n===== rank {self._comm.rank} of {self._comm.size}: "
        os.write(self._stderr, f"{header}{text}\n".encode(errors="replace"))
        self._world.Abort(1)
        os._exit(1)

    # A failing rank ends the job.

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Abort on a failure in setup, call or teardown; remember the outcome otherwise."""
        if report.failed:
            output = "\n".join(f"--- {name}\n{content}" for name, content in report.sections)
            self._abort(f"{report.nodeid} failed in {report.when}\n{report.longreprtext}\n{output}")
        self._outcomes.append(f"{report.when} {report.outcome}")

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Abort when a file cannot be imported."""
        if report.failed:
            self._abort(f"{report.nodeid} cannot be collected\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        """Abort when pytest itself fails."""
        self._abort(f"internal error of pytest\n{excrepr}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Abort when the session ends with anything but success or "no tests"."""
        gc.unfreeze()  # else Triton, at the end, tells of every object that is left over
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._abort(f"pytest ended with status {int(exitstatus)}")

    # The ranks stay together.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what needs more ranks, or another number of them: it lacks nothing, and runs where they are."""
        others = [item for item in items if _fewest_ranks(item) > self._comm.size or _has_no_placement(item)]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Abort unless every rank is about to run the same tests."""
        own = [item.nodeid for item in session.items]
        if any(other != own for other in self._comm.allgather(own)):
            self._abort(f"the ranks collected different tests; here: {own}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run one test under a watchdog, then wait for the other ranks and compare outcomes."""
        self._outcomes.clear()
        watchdog = self._watch(item)
        try:
            result = yield
            meet(self._comm)
            outcomes = self._comm.allgather(list(self._outcomes))
            if any(other != self._outcomes for other in outcomes):
                self._abort(f"{item.nodeid} went differently on the ranks: {outcomes}")
            return result
        finally:
            watchdog.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, item: pytest.Item) -> threading.Timer:
        """Start the clock of one test: `mark.timeout(seconds)`, or one minute."""
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0]) if marker and marker.args else DEFAULT_TIMEOUT_S

        def expire() -> None:
            # First of all: all ranks come here at once, and the first to exit ends the others.
            line = f"\n===== rank {self._comm.rank} of {self._comm.size}: {item.nodeid} hung for {seconds:g} s\n"
            os.write(self._stderr, line.encode())
            faulthandler.dump_traceback(self._stderr, all_threads=True)
            # MPI_Abort from here could wait for a lock that the hanging call holds; an exit status cannot.
            tally = self._config.pluginmanager.getplugin("tally")
            if tally is not None:
                tally.counts["failed"] += 1
                tally.write()
            os._exit(1)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        # The timer needs the interpreter lock. Where a native call keeps it, this one ends the process.
        faulthandler.dump_traceback_later(seconds + 5, exit=True, file=self._stderr)
        return timer


def _has_no_placement(item: pytest.Item) -> bool:
    """Whether a test is for placements of which none has this number of ranks: pytest marks one without parameters."""
    marker = item.get_closest_marker("skip")
    return marker is not None and str(marker.kwargs.get("reason", "")).startswith("got empty parameter set")


def _fewest_ranks(item: pytest.Item) -> int:
    """How many ranks a test needs."""
    marker = item.get_closest_marker("mpi")
    return marker.kwargs.get("min_size", 1) if marker else 1


def pytest_configure(config: pytest.Config) -> None:
    """Join the ranks where pytest runs under mpirun."""
    if config.getoption("--with-mpi"):
        config.pluginmanager.register(RankHarness(config), "rank_harness")


@pytest.fixture
def world() -> Iterator[MPI.Intracomm]:
    """A communicator over all ranks, made for one test."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target`, `noisy` and `useless` for all ranks; the last has one KV head, which ranks must share."""
    from checkpoints import make_checkpoint
    from mpi4py import MPI
    from pipelines import noisy_copy, useless_draft

    folder = None
    if MPI.COMM_WORLD.rank == 0:
        folder = tmp_path_factory.mktemp("jobs")
        target = make_checkpoint(folder / "target", seed=1, num_hidden_layers=2, num_shards=1)
        noisy_copy(folder / "noisy", target, 0.05)
        useless_draft(folder / "useless")
    return from_rank_0(folder)


@pytest.fixture(params=["solo", "mpi", "nccl", "nccl without peers"])
def communicator(request: pytest.FixtureRequest, world: MPI.Intracomm) -> Iterator[Communicator]:
    """Every kind of communicator over all ranks, warm."""
    import torch
    from gpus import lacking

    from parallel.transports.mpi import MpiCommunicator
    from parallel.transports.nccl import NcclCommunicator, why_not
    from parallel.transports.solo import SoloCommunicator

    opened: Communicator
    if request.param == "solo":
        opened = SoloCommunicator()
    elif request.param == "mpi":
        opened = MpiCommunicator(world.Dup(), "test")
    else:
        device = torch.device("cuda", world.rank % max(1, torch.cuda.device_count()))
        reason = why_not(device)
        if reason:
            pytest.skip(lacking(f"NCCL: {reason}"))
        opened = NcclCommunicator(world.Dup(), "test", device, peers=request.param == "nccl")
    opened.warm_up()
    yield opened
    opened.close()
