"""A lost draft rank costs drafts only, and any other lost rank still ends the job: real ranks, killed and stopped.

Each test starts a job of `programs/loss_case.py`: under a parent as `trtrun run` is (`programs/loss_parent.py`), or
under an mpirun of its own. Bounds on time only tell an end from a hang; they are no measurement.
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from mpi_libraries import NO_NETWORKS

ROOT = Path(__file__).resolve().parents[2]
CASE, PARENT = "tests/ranks/programs/loss_case.py", "tests/ranks/programs/loss_parent.py"
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "--bind-to", "none", *NO_NETWORKS]
RANKS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
}
TIMEOUT = 60.0
SOON = 15.0
LOST = r"draft rank {rank} \(cpu:{slot}\) is lost: {cause}; the job goes on without drafts\n"
BROKE = r"its connection broke, last seen [^;\n]+"


class Job:
    """A running job, its ranks' processes known."""

    def __init__(self, command: list[str], **variables: object) -> None:
        settings = {f"LOSS_{name.upper()}": str(value) for name, value in variables.items()}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **RANKS_ENVIRONMENT, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""
        self.ranks = [int(word) for word in self.wait_for("pids").split()[1:]]

    def wait_for(self, words: str) -> str:
        """Read the job's output until a line holds `words`; returns the line."""
        assert self.process.stdout is not None
        line = ""
        while words not in line:
            line = self.process.stdout.readline()
            assert line, self.process.communicate(timeout=TIMEOUT)
            self.output += line
        return line

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self.ranks[rank], number)

    def finish(self) -> tuple[int, str]:
        """Exit status and stderr, once the job has ended; without what the library of events in mpirun says of the
        broken connection now and then."""
        assert self.process.stdout is not None
        watch = threading.Timer(TIMEOUT, self.process.kill)
        watch.start()
        try:
            # Not by communicate: it passes over lines that came with the one that `wait_for` has read.
            self.output += self.process.stdout.read()
            errors = self.process.communicate()[1]
        finally:
            watch.cancel()
        return self.process.returncode, re.sub(r"^\[warn\] Epoll .*\n", "", errors, flags=re.MULTILINE)

    def close(self) -> None:
        """End what is left of it."""
        for process in (*self.ranks, self.process.pid):
            try:
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.communicate(timeout=TIMEOUT)


StartJob = Callable[..., Job]


@pytest.fixture
def start_job() -> Iterator[StartJob]:
    """Return start(mpirun, **variables): a job under a parent, or under an mpirun of its own with some arguments."""
    jobs = []

    def start(mpirun: list[str] | None = None, **variables: object) -> Job:
        command = [sys.executable, PARENT]
        if mpirun is not None:
            ranks = str(3 + int(str(variables.get("drafts", 1))))
            command = [*MPIRUN, *mpirun, "-n", ranks, sys.executable, "-m", "mpi4py", CASE]
        jobs.append(Job(command, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def await_end(process: int) -> None:
    """Wait for a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], SOON)[0], f"process {process} runs on after {SOON} s"
    finally:
        os.close(descriptor)


def assert_went_on(job: Job, lost: list[int], rank: int, cause: str) -> None:
    """The job came to its end without the draft ranks, and said why in one line."""
    status, errors = job.finish()
    assert status == 0, errors
    assert re.fullmatch(LOST.format(rank=rank, slot=rank - 1, cause=cause), errors), errors
    seen = re.search(r"lost (\[.*\]) drafted (\d+) longest ([\d.]+)", job.output)
    assert seen is not None and seen[1] == str(lost), job.output
    assert "all is well" in job.output
    assert not any(is_alive(process) for process in job.ranks)


@pytest.mark.parametrize(("drafts", "rank"), [(1, 1), (2, 1), (2, 2)])
def test_a_killed_draft_rank_costs_drafts_only(start_job: StartJob, drafts: int, rank: int) -> None:
    job = start_job(drafts=drafts, tell=random.Random().randrange(1, 300))
    job.wait_for("running")
    job.signal(rank, signal.SIGKILL)
    assert_went_on(job, list(range(1, drafts + 1)), rank, BROKE)
    seen = re.search(r"drafted (\d+) longest ([\d.]+)", job.output)
    assert seen is not None and int(seen[1]) > 0, job.output
    assert float(seen[2]) < SOON  # a round; it takes some hundredths of a second


@pytest.mark.parametrize("drafts", [1, 2])
def test_a_stopped_draft_rank_is_given_up_and_ended(start_job: StartJob, drafts: int) -> None:
    job = start_job(drafts=drafts, limit=1)
    job.wait_for("running")
    job.signal(1, signal.SIGSTOP)
    assert_went_on(job, list(range(1, drafts + 1)), 1, r"silent for 1 s, last seen [^;\n]+")


def test_a_stopped_draft_rank_of_this_host_is_killed_while_the_job_goes_on(start_job: StartJob) -> None:
    job = start_job(limit=1, rounds=10**9)
    job.wait_for("running")
    job.signal(1, signal.SIGSTOP)
    await_end(job.ranks[1])
    assert job.process.poll() is None and all(map(is_alive, (job.ranks[0], *job.ranks[2:])))


def test_an_exception_in_a_draft_rank_costs_drafts_only(start_job: StartJob) -> None:
    job = start_job(drafts=2, kind="raises")
    assert_went_on(job, [1, 2], 1, "ValueError: the draft's device is on fire")


def test_a_stopped_draft_rank_out_of_reach_ends_itself_when_it_is_continued(start_job: StartJob) -> None:
    job = start_job(limit=1, kind="elsewhere", rounds=10**9)
    job.wait_for("running")
    job.signal(1, signal.SIGSTOP)
    assert job.process.stderr is not None
    assert "the job goes on without drafts" in job.process.stderr.readline()
    assert is_alive(job.ranks[1])
    job.signal(1, signal.SIGCONT)
    await_end(job.ranks[1])
    assert job.process.poll() is None and all(map(is_alive, (job.ranks[0], *job.ranks[2:])))


def test_a_stopped_draft_rank_out_of_reach_does_not_hold_up_the_end(start_job: StartJob) -> None:
    job = start_job(limit=1, kind="elsewhere")
    job.wait_for("running")
    job.signal(1, signal.SIGSTOP)
    assert_went_on(job, [1], 1, r"silent for 1 s, last seen [^;\n]+")


def test_no_rank_waits_in_the_end_for_one_that_may_die_there(start_job: StartJob) -> None:
    job = start_job(expected=0, kind="lingers")
    for rank in (0, 2, 3):
        await_end(job.ranks[rank])
    job.signal(1, signal.SIGKILL)
    assert job.finish() == (0, "")
    assert "all is well" in job.output


@pytest.mark.parametrize("words", ["lost []", "all is well"])
def test_a_draft_rank_that_dies_while_the_job_ends_holds_nobody_up(start_job: StartJob, words: str) -> None:
    job = start_job(expected=0)
    job.wait_for(words)
    with suppress(ProcessLookupError):  # it was quicker
        job.signal(1, signal.SIGKILL)
    status, errors = job.finish()
    assert status == 0, errors
    assert errors == "" or re.fullmatch(LOST.format(rank=1, slot=0, cause=BROKE), errors), errors


@pytest.mark.parametrize(
    ("rank", "number", "name"),
    [
        (0, signal.SIGKILL, "orchestrator rank 0 (host)"),
        (2, signal.SIGKILL, "target rank 2 (cpu:1)"),
        (3, signal.SIGTERM, "target rank 3 (cpu:2)"),
    ],
)
def test_any_other_killed_rank_ends_the_job_with_its_name(
    start_job: StartJob, rank: int, number: signal.Signals, name: str
) -> None:
    job = start_job(expected=0, rounds=10**9)
    job.wait_for("running")
    job.signal(rank, number)
    status, errors = job.finish()
    where = f"process {job.ranks[rank]} on {os.uname().nodename}"
    assert errors == f"trtrun: {name} was killed by signal {int(number)} ({number.name}), {where}\n"
    assert status == 128 + number
    assert not any(is_alive(process) for process in job.ranks)


def test_another_rank_that_exits_ends_the_job_with_its_status(start_job: StartJob) -> None:
    job = start_job(expected=0, rounds=10**9, kind="exits")
    assert job.finish() == (3, "trtrun: a rank ended with exit code 3 and said nothing\n")
    assert not any(is_alive(process) for process in job.ranks)


def test_a_draft_rank_that_is_killed_in_the_start_ends_the_job(start_job: StartJob) -> None:
    job = start_job(kind="starts")
    job.signal(1, signal.SIGKILL)
    status, errors = job.finish()
    host = os.uname().nodename
    # Open MPI 5.0 may crash where a rank is lost while others make a communicator (ompi_comm_revoke_local): what it
    # says of that begins with the host and the process.
    said = [line for line in errors.splitlines() if not line.startswith(f"[{host}:")]
    where = f"process {job.ranks[1]} on {host}"
    assert (status, said) == (137, [f"trtrun: draft rank 1 (cpu:0) was killed by signal 9 (SIGKILL), {where}"])


def test_under_a_users_own_mpirun_the_job_goes_on_as_well(start_job: StartJob) -> None:
    job = start_job(["--with-ft", "ulfm"])
    job.wait_for("running")
    job.signal(1, signal.SIGKILL)
    assert_went_on(job, [1], 1, BROKE)


def test_under_a_users_own_mpirun_another_lost_rank_is_named(start_job: StartJob) -> None:
    job = start_job(["--with-ft", "ulfm"], expected=0, rounds=10**9)
    job.wait_for("running")
    job.signal(3, signal.SIGKILL)
    status, errors = job.finish()
    assert status == 1
    # Rank 2, whose sum with it failed, is not at fault.
    named = re.findall(r"RankFailedError: (.*), last seen", errors)
    assert named == ["target rank 3 (cpu:2) failed: its connection broke"], errors


def test_without_ulfm_a_lost_draft_rank_ends_the_job(start_job: StartJob) -> None:
    job = start_job([], rounds=10**9)
    job.wait_for("running")
    job.signal(1, signal.SIGKILL)
    status, errors = job.finish()
    assert status == 137 and "noticed that process rank 1" in errors
    assert "goes on" not in errors
