"""Time limits of a job: a rank that is silent or stands still is named, with its stack, and the job ends.

Each test starts a real job of a draft and a target rank beside the orchestrator, or of two target ranks
(`programs/heartbeat_case.py`). Bounds on time only tell an end from a hang; they are no measurement.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from forked_commands import shared_commands
from forked_ranks import stand_in
from mpi_libraries import NO_NETWORKS
from pipelines import noisy_copy

PROGRAM = "tests/ranks/programs/heartbeat_case.py"
ROOT = Path(__file__).resolve().parents[2]
NAMES = ["orchestrator rank 0 (host)", "draft rank 1 (cpu:0)", "target rank 2 (cpu:1)", "target rank 3 (cpu:2)"]
RANKS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "PYTHONUNBUFFERED": "1",
}
EVERY_RANK = -2
LIMIT = 2.0
SOON = 30.0
TIMEOUT = 150.0

RunRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the program: a pair with a long context."""
    folder = tmp_path_factory.mktemp("models")
    target = make_checkpoint(folder / "target", num_hidden_layers=6, max_position_embeddings=65536)
    draft = noisy_copy(folder / "draft", target, 0.05)
    return {
        "HEARTBEAT_TARGET": str(target),
        "HEARTBEAT_DRAFT": str(draft),
        "HEARTBEAT_LIMIT": str(LIMIT),
    }


def case(models: dict[str, str], kind: str, rank: int, **more: object) -> dict[str, str]:
    extra = {f"HEARTBEAT_{name.upper()}": str(value) for name, value in more.items()}
    return {**models, "HEARTBEAT_KIND": kind, "HEARTBEAT_RANK": str(rank), **extra}


def own_lines(stderr: str) -> list[str]:
    """What trtrun said itself, without the stacks, or as the exception that ended the program: both as "trtrun: …".

    mpirun may leave a NUL byte before a line.
    """
    lines = [line.strip("\0").replace("trtrun.errors.RankFailedError: ", "trtrun: ") for line in stderr.splitlines()]
    return [line for line in lines if "trtrun: " in line]


def stack_of(stderr: str, name: str) -> str:
    """The stack that stands under a rank's name."""
    found = re.search(rf"^--- main thread of [^\n]*{re.escape(name)}[^\n]*\n((?:  .*\n)+)", stderr, re.MULTILINE)
    assert found is not None, stderr
    return found[1]


def seconds_since(stdout: str, ended: float) -> float:
    stood = re.search(r"standing still at ([\d.]+)", stdout)
    assert stood is not None, stdout
    return ended - float(stood[1])


@pytest.mark.parametrize(
    ("rank", "kind", "phase", "plans_ahead"),
    [
        (1, "python", "drafting", 0),
        (3, "layer", "verifying", 1),
    ],
)
def test_a_worker_that_stands_still_in_python_is_named_and_not_the_ranks_that_wait_for_it(
    run_ranks: RunRanks, models: dict[str, str], rank: int, kind: str, phase: str, plans_ahead: int
) -> None:
    """Between forwards, and inside a layer of one, with which others got done before."""
    size = max(3, rank + 1)
    done = run_ranks(size, PROGRAM, env=case(models, kind, rank, plans_ahead=plans_ahead), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(
        rf"trtrun: {re.escape(NAMES[rank])} failed: stands still in round \d+ \({phase}\) for longer than 2 s", line
    ), line
    assert "stuck_in_python" in stack_of(done.stderr, NAMES[rank])
    # The stack of the one at fault comes first; the others' say for whom they wait.
    assert done.stderr.index(f"main thread of {NAMES[rank]}") == done.stderr.index("main thread of ")
    assert all("stuck_in_python" not in stack_of(done.stderr, name) for name in NAMES[:size] if name != NAMES[rank])
    assert LIMIT <= seconds_since(done.stdout, done.ended) < SOON


def test_a_worker_whose_threads_cannot_run_is_named_and_leaves_its_stack(
    run_ranks: RunRanks, models: dict[str, str]
) -> None:
    done = run_ranks(3, PROGRAM, env=case(models, "native", 2), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(
        rf"trtrun: {re.escape(NAMES[2])} failed: silent for 2 s, last seen (in|idle after) round \d+.*", line
    ), line
    # Written by C code: under the name that its heartbeat's thread bears.
    assert f"in heartbeat of {NAMES[2]}\n" in done.stderr
    assert "in stuck_in_native_code\n" in done.stderr
    assert seconds_since(done.stdout, done.ended) < SOON


def test_an_orchestrator_that_stands_still_in_python_is_named(run_ranks: RunRanks, models: dict[str, str]) -> None:
    done = run_ranks(3, PROGRAM, env=case(models, "python", 0), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(
        rf"trtrun: {re.escape(NAMES[0])} failed: stands still in round \d+ \(scheduling\) for longer than 2 s", line
    ), line
    assert "stuck_in_python" in stack_of(done.stderr, NAMES[0])


def test_an_orchestrator_whose_threads_cannot_run_is_named_by_a_worker(
    run_ranks: RunRanks, models: dict[str, str]
) -> None:
    done = run_ranks(3, PROGRAM, env=case(models, "native", 0), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    lines = own_lines(done.stderr)
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"trtrun: {NAMES[0]} failed: silent for 2 s, last seen ")
    assert lines[0].endswith(f"as told by {NAMES[1]}")
    assert f"in heartbeat of {NAMES[0]}\n" in done.stderr
    assert "in stuck_in_native_code\n" in done.stderr


def test_rounds_that_are_slow_but_end_within_the_limit_go_on(run_ranks: RunRanks, models: dict[str, str]) -> None:
    """Whichever rank is slow: each of them in rounds of its own. And a program may take its time between calls."""
    done = run_ranks(3, PROGRAM, env=case(models, "slow", EVERY_RANK), timeout=TIMEOUT, forked=True)
    assert done.returncode == 0, done.stderr
    assert "all is well" in done.stdout
    assert own_lines(done.stderr) == []


def test_a_round_of_several_times_the_limit_goes_on_while_layers_get_done(
    run_ranks: RunRanks, models: dict[str, str]
) -> None:
    """Such as a long prefill of a large model: six layers, each of them slower than half of the limit."""
    done = run_ranks(3, PROGRAM, env=case(models, "slow-layers", EVERY_RANK), timeout=TIMEOUT, forked=True)
    assert done.returncode == 0, done.stderr
    assert "all is well" in done.stdout
    assert own_lines(done.stderr) == []
    slow = [float(seconds) for seconds in re.findall(r"a forward of ([\d.]+) s", done.stdout)]
    assert len(slow) == 2 and min(slow) > 3 * LIMIT, done.stdout


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [
        ("loading", 2, r"target rank 2 \(cpu:1\): weights \d+ %"),
        ("warming", 1, r"draft rank 1 \(cpu:0\): warming up"),
        ("missing", 2, r"target rank 2 \(cpu:1\): not heard of"),
    ],
)
def test_a_start_that_takes_too_long_ends_with_where_each_late_rank_is(
    run_ranks: RunRanks, models: dict[str, str], kind: str, rank: int, words: str
) -> None:
    done = run_ranks(3, PROGRAM, env=case(models, kind, rank, start=8), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert line.startswith("trtrun: the job has not started within 8 s (launch.start_seconds): ")
    assert re.search(words, line), line
    if kind == "loading":
        assert all(name not in line for name in NAMES[:3] if name != NAMES[rank]), line
    if kind != "missing":  # who was never heard of cannot be asked
        assert "stuck_in_python" in stack_of(done.stderr, NAMES[rank])


def test_a_worker_that_cannot_reach_rank_0_says_so_at_start(run_ranks: RunRanks, models: dict[str, str]) -> None:
    done = run_ranks(3, PROGRAM, env=case(models, "unreachable", 0), timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    host = re.escape(os.uname().nodename)
    assert re.fullmatch(
        rf"trtrun: {re.escape(NAMES[1])} failed: HeartbeatError: host {host} has no TCP connection to rank 0 on host "
        rf"{host} \(127\.0\.0\.1 port \d+: .*refused\); a firewall between the two must let TCP connections through",
        line,
    ), line


class Job:
    """A job of three ranks without a parent of trtrun's, its ranks' processes known."""

    def __init__(self, environment: dict[str, str]) -> None:
        mpirun = str(Path(sys.executable).parent / "mpirun")
        before = stand_in(shared_commands().address)
        self.process = subprocess.Popen(
            [mpirun, "--oversubscribe", "--bind-to", "none", *NO_NETWORKS, "-n", "3", *before, sys.executable, PROGRAM],
            cwd=ROOT,
            env={**os.environ, **RANKS_ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks: list[int] = []
        assert self.process.stdout is not None
        while not self.ranks:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            if line.startswith("pids"):
                self.ranks = [int(word) for word in line.split()[1:]]

    def wait_for(self, words: str) -> None:
        """Read the job's output until a line holds `words`."""
        assert self.process.stdout is not None
        while words not in (line := self.process.stdout.readline()):
            assert line, self.process.communicate()

    def close(self) -> None:
        """End what is left of it."""
        for process in (*self.ranks, self.process.pid):
            try:
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate(timeout=SOON)


StartJob = Callable[[dict[str, str]], Job]


@pytest.fixture
def start_job() -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start(environment: dict[str, str]) -> Job:
        jobs.append(Job(environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def await_end(process: int, seconds: float) -> None:
    """Wait until a process has ended; fail the test when it has not within `seconds`."""
    descriptor = os.pidfd_open(process)
    try:
        assert select.select([descriptor], [], [], seconds)[0], f"process {process} runs on after {seconds} s"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stopped_worker_is_named_with_its_last_round(start_job: StartJob, models: dict[str, str], rank: int) -> None:
    job = start_job(case(models, "endless", -1))
    job.wait_for("running")
    os.kill(job.ranks[rank], signal.SIGSTOP)
    _, stderr = job.process.communicate(timeout=TIMEOUT)
    assert job.process.returncode != 0
    (line,) = own_lines(stderr)
    pattern = rf"trtrun: {re.escape(NAMES[rank])} failed: silent for 2 s, last seen (in|idle after) round \d+.*"
    assert re.fullmatch(pattern, line), line
    for name in NAMES[:3]:
        if name != NAMES[rank]:
            # All others wait; but the target goes on without a draft rank that is late.
            assert ("/trtrun/" if (rank, name) == (1, NAMES[2]) else "parallel") in stack_of(stderr, name)


def test_the_workers_of_a_stopped_orchestrator_end_themselves(start_job: StartJob, models: dict[str, str]) -> None:
    job = start_job(case(models, "endless", -1))
    job.wait_for("running")
    # Nor does mpirun end anybody: it is stopped, too.
    os.kill(job.process.pid, signal.SIGSTOP)
    os.kill(job.ranks[0], signal.SIGSTOP)
    for process in job.ranks[1:]:
        await_end(process, SOON)
    os.kill(job.process.pid, signal.SIGCONT)
    _, stderr = job.process.communicate(timeout=TIMEOUT)
    assert job.process.returncode != 0
    lines = own_lines(stderr)
    # The first worker speaks, and the others give its word time to end them; mpirun could not do that here.
    assert len(lines) == 2, stderr
    assert lines[0].startswith(f"trtrun: {NAMES[0]} failed: silent for 2 s, last seen ")
    assert lines[0].endswith(f"as told by {NAMES[1]}")


def test_ending_does_not_wait_for_a_launcher_that_does_not_answer(start_job: StartJob, models: dict[str, str]) -> None:
    """MPI's abort asks mpirun, which is stopped here: the rank that ends the job must exit all the same."""
    job = start_job(case(models, "python", 2))
    job.wait_for("standing still")
    os.kill(job.process.pid, signal.SIGSTOP)
    await_end(job.ranks[0], SOON)
