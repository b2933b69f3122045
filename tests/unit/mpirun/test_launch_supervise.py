"""The process that watches mpirun: exit statuses, signals, nothing left behind. Plain Python stands in for mpirun."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch.jobs.mpi.start_progress import OVER
from launch.jobs.mpi.supervise import _Orders

PARENT = """
import os, sys
import launch.jobs.mpi.supervise
from launch.jobs.mpi.output_filter import OutputFilter
from launch.jobs.mpi.output_filter import RankEnds
from launch.jobs.mpi.start_progress import StartWatch
from launch.jobs.mpi.supervise import supervise
launch.jobs.mpi.supervise.DRAIN_GRACE_SECONDS = 0.1
drain_seconds = float(sys.argv[2]) if sys.argv[2] else None
command = [sys.executable, "-c", sys.argv[1]]
output, steps = OutputFilter(lambda rank: f"draft rank {rank} (cpu:0)"), None
if "MAY_LOSE_RANKS" in os.environ:
    launch.jobs.mpi.supervise.OVER_GRACE_SECONDS = 0.1
    output.ends, steps = RankEnds(), StartWatch(output.describe, 2, 600.0, "the start")
sys.exit(supervise(command, os.environ, output, drain_seconds, steps))
"""

# Says where its orders come from, then what they are; ends when one that it knows has come.
DRAINING = """
import os, sys
print(os.environ.get("TRTRUN_CONTROL"), flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
    if line.startswith("drain"):
        sys.exit(3)
"""

# A child in a process group of its own, as mpirun's ranks are, that does not heed SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
     "print('up', flush=True)\\ntime.sleep(600)"],
    preexec_fn=os.setpgrp, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
"""


def start(code: str, drain_seconds: float | None = None, **variables: str) -> subprocess.Popen[str]:
    """A parent that supervises this code. In tests the ranks have 0.1 s beyond the time for a drain."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, textwrap.dedent(code), str(drain_seconds or "")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), **variables},
    )


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("status", [0, 1, 2, 17])
def test_the_status_of_the_job_is_passed_on(status: int) -> None:
    process = start(f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({status})")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (status, "out\n", "err\n")


def test_a_job_that_fails_in_silence_gets_a_line() -> None:
    process = start("import sys; sys.exit(3)")
    assert "exit code 3" in process.communicate(timeout=60)[1]
    assert process.returncode == 3


def test_what_the_host_lacks_is_said_behind_mpiruns_own_words(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    code = "import os, signal, sys; print('a box', file=sys.stderr); {}"
    process = start(code.format("sys.exit(213)"), TMPDIR=str(folder))
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (213, "")
    first, second = errors.splitlines()
    assert first == "a box" and second.startswith(f"trtrun: the temporary folder {folder} cannot be used")
    process = start(code.format("sys.exit(2)"), TMPDIR=str(folder))  # refused: that has its own line
    assert process.communicate(timeout=60)[1] == "a box\n"


def test_a_killed_rank_decides_the_status() -> None:
    box = (
        "-" * 74
        + "\nprterun noticed that process rank 1 with PID 5 on node vm exited on\nsignal 9 (Killed).\n"
        + "-" * 74
    )
    process = start(f"import sys; print({box!r}, file=sys.stderr); sys.exit(1)")
    errors = process.communicate(timeout=60)[1]
    assert errors == "trtrun: draft rank 1 (cpu:0) was killed by signal 9 (SIGKILL), process 5 on vm\n"
    assert process.returncode == 137


@pytest.mark.parametrize("status", [0, 3])
def test_an_mpirun_that_waits_for_a_lost_host_is_ended_once_rank_0_is_done(status: int) -> None:
    code = f"""
        import sys, time
        print("out", flush=True)
        sys.stderr.write("\x1etrtrun 0 {OVER} 1 here {status}\\n")
        sys.stderr.flush()
        time.sleep(600)
    """
    process = start(code, MAY_LOSE_RANKS="1")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (status, "out\n")
    assert "killed" not in errors


def test_what_mpirun_leaves_behind_is_killed() -> None:
    process = start(STUBBORN)  # ends at once, its child does not
    left_behind = int(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert not is_alive(left_behind)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_everything(number: signal.Signals) -> None:
    process = start(STUBBORN + "time.sleep(600)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert number.name in errors
    assert not is_alive(child)


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it for what it starts
    try:
        process = start("import time; print('started', flush=True); time.sleep(600)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_can_drain_is_asked_to_and_decides_the_status(number: signal.Signals) -> None:
    process = start(DRAINING, drain_seconds=60)
    assert process.stdout is not None
    assert process.stdout.readline() == "stdin\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, f"drain {number.name}\n")
    assert "said nothing" in errors  # it is rank 0 that tells of a drain


def test_an_order_waits_for_a_job_that_is_only_starting() -> None:
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(1)\n" + DRAINING, drain_seconds=60)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "stdin\ndrain SIGUSR1\n"
    assert process.returncode == 3


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_drain_at_once_and_a_warning_does_not(second: signal.Signals) -> None:
    process = start("print('up', flush=True)\n" + DRAINING.replace("sys.exit(3)", "pass"), drain_seconds=600)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "stdin\n"]
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "drain SIGTERM\n"
    for number in (signal.SIGUSR1, signal.SIGUSR1, second):
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (128 + second, "")
    assert errors == f"trtrun: ended by {second.name}; all ranks are stopped\n"


def test_a_job_that_does_not_drain_in_time_is_killed_and_counts_as_drained() -> None:
    process = start(STUBBORN + "time.sleep(600)", drain_seconds=0.1)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "did not drain in time after SIGUSR1 and were killed; --resume goes on" in errors
    assert not is_alive(child)


@pytest.mark.parametrize("status", [3, 1])
def test_a_rank_that_does_not_reach_rank_0_is_told_of_unless_the_job_has_drained(status: int) -> None:
    line = (
        "trtrun: draft rank 1 (cpu:0) failed: HeartbeatError: host vm has no TCP connection to rank 0 on host vm (x)\n"
    )
    code = f"import sys\nsys.stderr.write({line!r})\n{DRAINING.replace('sys.exit(3)', f'sys.exit({status})')}"
    process = start(code, drain_seconds=60)
    assert process.stdout is not None
    assert process.stdout.readline() == "stdin\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert (line in errors) == (status != 3)


@pytest.mark.parametrize(("found", "status"), [(0, 1), (255, 1), (2, 2)])
def test_a_job_that_lost_a_host_has_failed_whatever_mpirun_makes_of_it(found: int, status: int) -> None:
    line = "trtrun: draft rank 1 (south cpu:0) failed: silent for 5 s\n"
    process = start(f"import sys; sys.stderr.write({line!r}); sys.exit({found})")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, line)


@pytest.mark.parametrize(("drain_seconds", "status"), [(60.0, 3), (None, -signal.SIGTERM)])
def test_a_signal_that_comes_before_the_job_is_started_reaches_it(drain_seconds: float | None, status: int) -> None:
    orders = _Orders(drain_seconds)
    with orders.heard():
        signal.raise_signal(signal.SIGUSR1)
        with subprocess.Popen([sys.executable, "-c", DRAINING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
            orders.follow(job)
            assert job.stdout is not None
            output = job.stdout.read()
    assert job.returncode == status
    assert (b"drain SIGUSR1" in output) == (drain_seconds is not None)


def test_a_job_that_cannot_drain_has_no_orders_to_read() -> None:
    code = "import os, sys; print(os.environ.get('TRTRUN_CONTROL'), repr(sys.stdin.read()))"
    process = start(code, TRTRUN_CONTROL="stdin")  # of a job around this one
    assert process.communicate(timeout=60)[0] == "None ''\n"


def test_the_job_ends_when_its_parent_is_killed() -> None:
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert process.stdout is not None
    with os.fdopen(os.pidfd_open(int(process.stdout.readline()))) as child:
        process.kill()
        ended, _, _ = select.select([child], [], [], 60)
        process.communicate(timeout=60)
    assert ended


def test_a_rank_that_does_not_call_mpi_ends_with_its_launcher() -> None:
    rank = (
        "import time; from launch.jobs.mpi.processes import end_with_parent; end_with_parent();"
        "print('up', flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
         "print(p.pid, flush=True); p.wait()", rank],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert launcher.stdout is not None
    lines = {launcher.stdout.readline().strip(), launcher.stdout.readline().strip()}
    with os.fdopen(os.pidfd_open(int(next(line for line in lines if line != "up")))) as child:
        launcher.kill()
        ended, _, _ = select.select([child], [], [], 60)
        launcher.communicate(timeout=60)
    assert ended
