"""Marks of steps: none reaches the user, and the parent names the rank that holds up the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.jobs.mpi.start_progress import DONE, EXPENDABLE, OVER, StartWatch
from parallel.watchdog.fault_attribution import SILENT_SECONDS

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    """A clock that stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StartWatch:
    return StartWatch(lambda rank: f"rank {rank}", 3, 10.0, "the check", clock=clock)


def mark(rank: int, number: int, step: str = "a step", process: int = 1, host: str = "elsewhere") -> str:
    """What a rank writes."""
    return f"\x1etrtrun {rank} {number} {process} {host} {step}\n"


def hear_all(watch: StartWatch, *numbers: int) -> None:
    """Every rank is heard of, at these steps."""
    for rank, number in enumerate(numbers):
        watch.feed(mark(rank, number, f"step {number}"))


def test_marks_vanish_wherever_they_are_cut(watch: StartWatch) -> None:
    text = f"one\n{mark(0, 1)}loading [##{mark(1, 2, 'reading models')}##]\rtwo{mark(2, 5)}\n"
    for size in (1, 2, 7, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert "".join(watch.feed(piece) for piece in pieces) == "one\nloading [####]\rtwo\n"
    assert watch.find_stuck() == [0]


def test_what_is_no_step_is_known_and_no_rank_is_ahead_by_it(watch: StartWatch) -> None:
    hear_all(watch, 5, 5, 2)
    assert watch.feed(mark(0, EXPENDABLE, "1 2") + mark(0, OVER, "3")) == ""
    assert (watch.expendable, watch.status) == ({1, 2}, 3)
    assert watch.find_stuck() == [2]


def test_other_control_characters_pass(watch: StartWatch) -> None:
    text = "\x1e" + "x" * 2000 + "\x1e\n"
    assert watch.feed(text) + watch.feed("y" * 1000) == text + "y" * 1000


def test_text_before_what_may_become_a_mark_is_not_held_back(watch: StartWatch) -> None:
    assert watch.feed("loading\r\x1etrt") == "loading\r"
    assert watch.feed("run 0 1 1 h x\nnext") == "next"


def test_nothing_is_told_in_time_or_when_all_are_done(watch: StartWatch, clock: Clock) -> None:
    hear_all(watch, 4, 4, 4)
    clock.now += 9
    assert watch.give_up() == []
    assert not watch.is_given_up
    hear_all(watch, DONE, DONE, DONE)
    clock.now += 9
    assert watch.give_up() == []


def test_a_rank_that_was_never_heard_of_is_named_alone(watch: StartWatch, clock: Clock) -> None:
    watch.feed(mark(0, 0))
    watch.feed(mark(2, 0))
    clock.now += 11
    assert watch.give_up() == ["the check was not done after 10 s: rank 1 has not begun: nothing was heard of it"]
    assert watch.is_given_up


def test_the_silent_rank_is_named_and_not_those_that_wait_for_it(watch: StartWatch, clock: Clock) -> None:
    hear_all(watch, 11, 8, 8)
    clock.now += SILENT_SECONDS + 8
    hear_all(watch, 11, 8)
    (line,) = watch.give_up()
    assert line.startswith("the check was not done after 10 s: rank 2 on elsewhere, process 1, is stuck in the step ")
    assert line.endswith("'step 8' (silent for 11 s)")


def test_of_ranks_that_all_live_the_ones_behind_are_named(watch: StartWatch, clock: Clock) -> None:
    clock.now += 11
    hear_all(watch, 11, 8, 8)
    assert watch.find_stuck() == [1, 2]
    assert watch.give_up()[0].endswith("rank 1 on elsewhere, process 1, is stuck in the step 'step 8' (alive)")


def test_a_rank_ahead_that_fell_silent_is_named_before_those_behind(watch: StartWatch, clock: Clock) -> None:
    hear_all(watch, 11, 11, 11)
    clock.now += 11
    watch.feed(mark(0, 12))
    watch.feed(mark(1, 8))
    assert watch.find_stuck() == [2]


def test_ranks_that_are_done_are_not_named(watch: StartWatch, clock: Clock) -> None:
    hear_all(watch, DONE, 4, DONE)
    clock.now += 11
    assert watch.find_stuck() == [1]


def test_in_the_start_of_mpi_all_are_silent_and_the_stopped_one_is_named(watch: StartWatch, clock: Clock) -> None:
    own = os.uname().nodename
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for rank, process in enumerate((os.getpid(), sleeper.pid, os.getpid())):
            watch.feed(mark(rank, 0, "start of MPI", process, own))
        clock.now += 11
        assert watch.find_stuck() == [1]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert watch.find_stuck() == [0, 1, 2]


def test_a_rank_marks_its_steps_and_repeats_them_only_where_a_parent_reads() -> None:
    code = (
        "import os, sys\n"
        "from launch.jobs.mpi.start_progress import StartProgress, say_hello\n"
        "say_hello()\n"
        "with StartProgress() as teller:\n"
        "    teller.tell(3, 'reading\\n\\x1emodels')\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"  # as a log file would
        "    sys.stdin.read()\n"
    )
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}

    def start(**more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**environment, **more}, text=True,
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    with start(TRTRUN_STEPS="1") as process:
        assert process.stderr is not None
        text = ""
        while text.count("\n") < 4:
            more = process.stderr.read(1)
            assert more, text
            text += more
        process.communicate(timeout=60)
    start_mark = f"\x1etrtrun 1 0 {process.pid} {os.uname().nodename} start of MPI\n"
    assert text == start_mark + 3 * f"\x1etrtrun 1 3 {process.pid} {os.uname().nodename} reading  models\n"
    with start() as process:
        assert process.communicate(timeout=60)[1] == ""


@pytest.mark.parametrize(("rank", "expected"), [("0", f" {OVER} "), ("1", "")])
def test_rank_0_tells_with_what_status_it_ends(rank: str, expected: str) -> None:
    code = "from launch.cli import leave; leave(4)"
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "TRTRUN_STEPS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, text=True, timeout=60,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert expected in done.stderr and done.stderr.endswith(" 4\n" if expected else "")
