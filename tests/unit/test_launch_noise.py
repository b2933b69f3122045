"""mpirun's boxes: which go, which stay, what is learned from them."""

from __future__ import annotations

import pytest

from launch.noise import NoiseFilter

LINE = "-" * 74 + "\n"
ABORT = (
    LINE
    + "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[43168,1],1]\n  Errorcode: 1\n\n"
    + "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\nYou may or may not see output\n"
    + LINE
    + LINE
    + 'prterun has exited due to process rank 1 with PID 0 on node vm calling\n"abort". This may have caused\n'
    + LINE
    + "\0"
)
NONZERO = (
    LINE
    + "prterun detected that one or more processes exited with non-zero status,\nthus causing the job to be "
    + "terminated. The first process to do so was:\n\n   Process name: [prterun-vm-6122@1,0]\n   Exit code:    2\n"
    + LINE
)
KILLED = LINE + "prterun noticed that process rank 2 with PID 6047 on node vm exited on\nsignal 9 (Killed).\n" + LINE
UNKNOWN = LINE + "There are not enough slots available in the system\n" + LINE


def make() -> NoiseFilter:
    return NoiseFilter(lambda rank: f"target rank {rank} (cpu:1)")


def run(text: str, step: int) -> tuple[str, NoiseFilter]:
    noise = make()
    shown = "".join(noise.feed(text[start : start + step]) for start in range(0, len(text), step))
    return shown + noise.flush(), noise


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize("box", [ABORT, NONZERO])
def test_boilerplate_goes_and_ranks_stay(box: str, step: int) -> None:
    shown, noise = run("trtrun: draft rank 1 failed: cause\n" + box, step)
    assert shown == "trtrun: draft rank 1 failed: cause\n"
    assert noise.said_something


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_a_killed_rank_is_named(step: int) -> None:
    shown, noise = run(KILLED, step)
    assert shown == "trtrun: target rank 2 (cpu:1) was killed by signal 9 (SIGKILL), process 6047 on vm\n"
    assert noise.killed == [(2, 9)]


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize(
    "text", [UNKNOWN, LINE, LINE + "half a box\n", "a\n\nb", "Traceback\n" + LINE + "x\n", "---- x\n"]
)
def test_everything_else_passes_unchanged(text: str, step: int) -> None:
    assert run(text, step)[0] == text


def test_boilerplate_alone_is_saying_nothing() -> None:
    assert not run(ABORT, 10**6)[1].said_something


def test_a_line_that_still_grows_is_shown_at_once() -> None:
    noise = make()
    assert noise.feed("\rloading 10 %") == "\rloading 10 %"
    assert noise.feed("\rloading 20 %") == "\rloading 20 %"


def test_a_pause_releases_what_is_held_back() -> None:
    noise = make()
    assert noise.feed(LINE + "text of a rank\n") == ""
    assert noise.flush() == LINE + "text of a rank\n"
    assert noise.flush() == ""


def test_a_box_without_end_is_released() -> None:
    text = LINE + "line\n" * 60
    assert make().feed(text).startswith(LINE)
