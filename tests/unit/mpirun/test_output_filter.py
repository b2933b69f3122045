"""mpirun's boxes: which go, which stay, what is learned from them."""

from __future__ import annotations

import pytest

from launch.jobs.mpi.output_filter import OutputFilter

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


def make() -> OutputFilter:
    return OutputFilter(lambda rank: f"target rank {rank} (cpu:1)")


def run(text: str, step: int) -> tuple[str, OutputFilter]:
    output = make()
    shown = "".join(output.feed(text[start : start + step]) for start in range(0, len(text), step))
    return shown + output.flush(), output


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize("box", [ABORT, NONZERO])
def test_boilerplate_goes_and_ranks_stay(box: str, step: int) -> None:
    shown, output = run("trtrun: draft rank 1 failed: cause\n" + box, step)
    assert shown == "trtrun: draft rank 1 failed: cause\n"
    assert output.said_something


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_a_killed_rank_is_named(step: int) -> None:
    shown, output = run(KILLED, step)
    assert shown == "trtrun: target rank 2 (cpu:1) was killed by signal 9 (SIGKILL), process 6047 on vm\n"
    assert output.killed == [(2, 9)]


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize(
    "text", [UNKNOWN, LINE, LINE + "half a box\n", "a\n\nb", "Traceback\n" + LINE + "x\n", "---- x\n"]
)
def test_everything_else_passes_unchanged(text: str, step: int) -> None:
    assert run(text, step)[0] == text


def test_boilerplate_alone_is_saying_nothing() -> None:
    assert not run(ABORT, 10**6)[1].said_something


def test_a_line_that_still_grows_is_shown_at_once() -> None:
    output = make()
    assert output.feed("\rloading 10 %") == "\rloading 10 %"
    assert output.feed("\rloading 20 %") == "\rloading 20 %"


def test_a_pause_releases_what_is_held_back() -> None:
    output = make()
    assert output.feed(LINE + "text of a rank\n") == ""
    assert output.flush() == LINE + "text of a rank\n"
    assert output.flush() == ""


def test_a_box_without_end_is_released() -> None:
    text = LINE + "line\n" * 60
    assert make().feed(text).startswith(LINE)


LOST = (
    LINE
    + "PRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [prterun-north-1@0,0] on node north\n"
    + "  Remote daemon: [prterun-north-1@0,1] on node south\n\nThis is usually due to either a failure of the TCP\n"
    + LINE
)
DISCONNECTED = (
    LINE
    + "An MPI communication peer process has unexpectedly disconnected.  This\nusually indicates a failure\n\n"
    + "  Local host: north\n  Local PID:  677\n  Peer host:  south\n"
    + LINE
)
SOCKET_CLOSED = (
    "[north:00000] *** An error occurred in Socket closed\n[north:00000] *** reported by process [2959802369,2]\n"
    "[north:00000] *** on a NULL communicator\n[north:00000] *** Unknown error\n"
    "[north:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
    "[north:00000] ***    and MPI will try to terminate your MPI job as well)\n"
)
REPEATED = (
    "[north:00677] Delaying for 1 seconds before aborting\n"
    "1 more process has sent help message help-mpi-api.txt / mpi-abort\n"
    "[north:01181] 2 more processes have sent help message help-mpi-btl-tcp.txt / peer hung up\n"
    "[north:21391] PMIX ERROR: PMIX_ERR_UNREACH in file /openpmix/src/ptl_base_connection_hdlr.c at line 121\n"
    "[north:01176] plm:ssh: Warning: setpgid(1179,1179) failed in parent with errno=Permission denied(13)\n"
    "[north:01380] pmix_ptl_base: send_msg: write failed: Connection reset by peer (104) [sd = 28]\n"
    "[warn] Epoll MOD(4) on fd 22 failed. Old events were 6; read change was 2 (del); write change was 0 (none); "
    "close change was 0 (none): Bad file descriptor\n"
    '[north:01181] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n'
    "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
)
HYDRA = (
    "[proxy:0@north] main (/mpich-5.0.2/src/pm/hydra/proxy/pmip.c:123): demux engine error waiting for event\n"
    "[mpiexec@north] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error\n"
)
EQUALS = "=" * 83 + "\n"
TERMINATED = (
    "\n" + EQUALS + "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 5784 RUNNING AT south\n"
    "=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n" + EQUALS
)


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_a_lost_host_is_named(step: int) -> None:
    shown, output = run(LOST, step)
    assert shown == "trtrun: mpirun lost the connection to host south; the job ends\n"
    assert output.lost_hosts == ["south"] and output.has_failed


def test_a_lost_host_that_the_heartbeat_has_named_is_no_news() -> None:
    line = "trtrun: draft rank 1 (south cpu:1) failed: silent for 5 s, last seen idle\n"
    shown, output = run(line + LOST, 10**6)
    assert shown == line
    assert output.has_failed


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_ranks_that_notice_that_another_was_killed_are_not_heard(step: int) -> None:
    shown, output = run(DISCONNECTED + SOCKET_CLOSED + REPEATED + KILLED, step)
    assert shown == "trtrun: target rank 2 (cpu:1) was killed by signal 9 (SIGKILL), process 6047 on vm\n"
    assert output.finish() == ""


def test_a_lost_connection_is_told_where_nothing_else_explains_it() -> None:
    shown, output = run("trtrun: 3 prompts\n" + DISCONNECTED + SOCKET_CLOSED + REPEATED, 10**6)
    assert shown == "trtrun: 3 prompts\n"
    assert output.finish() == DISCONNECTED + SOCKET_CLOSED
    assert output.said_something


def test_an_error_of_mpi_that_is_not_a_lost_connection_stays() -> None:
    text = SOCKET_CLOSED.replace("Socket closed", "MPI_Recv")
    assert run(text, 10**6)[0] == text


def test_hydras_own_errors_are_told_only_where_nobody_names_a_rank() -> None:
    shown, output = run(HYDRA, 10**6)
    assert (shown, output.finish()) == ("", HYDRA)
    line = "trtrun: draft rank 1 (cpu:0) failed: cause\n"
    shown, output = run(line + HYDRA, 10**6)
    assert (shown, output.finish()) == (line, "")


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_hydras_box_on_stdout_becomes_a_line_on_stderr(step: int) -> None:
    output = make()
    data = b'{"index": 0}\n' + TERMINATED.encode()
    shown = b"".join(output.feed_output(data[start : start + step]) for start in range(0, len(data), step))
    assert shown + output.flush_output() == b'{"index": 0}\n\n'
    assert output.flush() == "trtrun: a rank was killed by signal 9 (SIGKILL), on south\n"
    assert output.killed == [(-1, 9)]


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize(
    "data",
    [
        b"a title\n=======\n", EQUALS.encode(), (EQUALS + "a box of a text\n" + EQUALS).encode(), b"\xe4\xf6\0\r\n",
        b"=" * 70, EQUALS.encode() + b"line\n" * 60,
    ],
)  # fmt: skip
def test_stdout_passes_byte_by_byte(data: bytes, step: int) -> None:
    output = make()
    shown = b"".join(output.feed_output(data[start : start + step]) for start in range(0, len(data), step))
    assert shown + output.flush_output() == data
    assert not output.killed


def test_a_line_of_stdout_that_still_grows_is_shown_at_once() -> None:
    output = make()
    assert output.feed_output(b"one wor") == b"one wor"
    assert output.feed_output(b"d\n==") == b"d\n"
    assert output.flush_output() == b"=="


def test_in_a_job_that_is_being_ended_ends_are_no_news() -> None:
    output = make()
    output.is_expected = True
    output.feed_output(TERMINATED.encode())
    assert output.feed(LOST + DISCONNECTED + SOCKET_CLOSED + KILLED + HYDRA) + output.finish() == ""
    assert (output.killed, output.lost_hosts, output.has_failed) == ([], [], False)


def test_open_mpi_4_does_not_tell_the_process() -> None:
    assert run(KILLED.replace("6047", "0").replace("prterun", "mpirun"), 10**6)[0] == (
        "trtrun: target rank 2 (cpu:1) was killed by signal 9 (SIGKILL), on vm\n"
    )


def test_a_rank_that_does_not_reach_rank_0_is_no_news_where_that_has_ended_as_asked() -> None:
    line = (
        "trtrun: draft rank 1 (cpu:0) failed: HeartbeatError: host vm has no TCP connection to rank 0 on host vm "
        "(127.0.0.1 port 42591: [Errno 111] Connection refused); a firewall between the two must let TCP through\n"
    )
    drained, broken = make(), make()
    assert drained.feed(line) == broken.feed(line) == ""
    drained.is_expected = True
    assert drained.finish() == ""
    assert broken.has_failed
    assert broken.finish() == line
