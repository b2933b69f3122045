"""What mpirun tells of ranks that end, where it goes on without them: which ends are the job's, and what users read."""

from __future__ import annotations

import pytest

from launch.jobs.mpi.output_filter import OutputFilter, RankEnd, RankEnds

HEAD = "[north:28205] [prterun-north-28205@0,0] "
NAME = "[prterun-north-28205@1,2]"
KILLED = (
    f"{HEAD}odls:wait_local_proc child process {NAME} pid 28212 terminated\n"
    f"{HEAD}odls:waitpid_fired child process {NAME} terminated with signal Killed\n"
    f"{HEAD}errmgr:dvm: for proc {NAME} state ABORTED BY SIGNAL\n"
    f"{HEAD}errmgr:dvm: proc {NAME} aborted by signal\n"
)
KILLED_ELSEWHERE = f"{HEAD}errmgr:dvm: proc {NAME} aborted by signal\n"
EXITED = (
    f"{HEAD}odls:wait_local_proc child process {NAME} pid 28212 terminated\n"
    f"{HEAD}odls:waitpid_fired child [prterun-north-28205@1,2] exit code 3\n"
    f"{HEAD}errmgr:dvm: for proc {NAME} state EXITED WITH NON-ZERO STATUS\n"
    f"{HEAD}errmgr:dvm: proc {NAME} exited with non-zero status 3\n"
)
ABORTED = (
    f"{HEAD}errmgr:dvm: for proc {NAME} state CALLED ABORT\n"
    f"{HEAD}errmgr:dvm: proc {NAME} called abort with exit code 5\n"
    f"{HEAD}errmgr:dvm: proc {NAME} exited with non-zero status 5\n"
)
OTHERS = (
    f"{HEAD}odls:constructing child list\n"
    "[north:28205] [prterun-north-28205@0,0][/prrte/odls_base_default_fns.c:739] adding proc [x@1,0] to my local list\n"
    f"{HEAD}SENDING SIGCONT TO [prterun-north-28205@1,0]\n"
    f"{HEAD}errmgr:dvm: proc [prterun-north-28205@1,0] terminated without sync\n"
)


def make(*expendable: int) -> OutputFilter:
    return OutputFilter(lambda rank: f"target rank {rank} (cpu:1)", ends=RankEnds(frozenset(expendable)))


def feed(output: OutputFilter, text: str, step: int) -> str:
    return "".join(output.feed(text[start : start + step]) for start in range(0, len(text), step)) + output.flush()


@pytest.mark.parametrize("step", [1, 50, 10**6])
def test_a_killed_rank_that_the_job_needs_is_named_once_and_ends_it(step: int) -> None:
    output = make(1)
    shown = feed(output, OTHERS + "a rank's own line\n" + KILLED, step)
    assert shown.startswith(
        "a rank's own line\ntrtrun: target rank 2 (cpu:1) was killed by signal 9 (SIGKILL), process "
    )
    assert shown.count("\n") == 2 and "process 28212 on " in shown
    assert output.fatal_end == RankEnd(2, 28212, 9)
    assert output.killed == [(2, 9)]


def test_of_a_rank_on_another_host_the_signal_is_not_known() -> None:
    output = make()
    assert feed(output, KILLED_ELSEWHERE, 10**6) == "trtrun: target rank 2 (cpu:1) was killed by a signal\n"
    assert output.killed == [(2, 9)]


@pytest.mark.parametrize("text", [KILLED, KILLED_ELSEWHERE, EXITED])
def test_the_end_of_an_expendable_rank_is_no_news(text: str) -> None:
    output = make(2)
    assert feed(output, text + OTHERS, 10**6) == ""
    assert output.fatal_end is None and output.killed == [] and not output.said_something
    assert output.ends is not None and [end.rank for end in output.ends.forgiven] == [2]


def test_the_first_end_is_the_jobs_and_the_others_follow_from_it() -> None:
    output = make(1)
    assert feed(output, EXITED + KILLED, 10**6) == ""
    assert output.fatal_end == RankEnd(2, 28212, status=3)
    assert output.killed == []


@pytest.mark.parametrize("expendable", [1, 2])
def test_a_rank_that_aborts_ends_the_job_whoever_it_is(expendable: int) -> None:
    output = make(expendable)
    assert feed(output, ABORTED + KILLED, 10**6) == ""
    assert output.fatal_end == RankEnd(2, status=5, is_abort=True)
    assert output.killed == []


def test_other_lines_in_brackets_pass() -> None:
    lines = "[north:28205] *** Process received signal ***\n[0] a list\n"
    assert feed(make(), lines, 10**6) == lines
    assert OutputFilter(str).feed(KILLED) == KILLED  # where nobody asked mpirun to tell
