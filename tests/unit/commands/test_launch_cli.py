"""Errors become one line and an exit status; a rank that fails takes its job along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest

import launch.jobs.mpi.job
from launch.cli import guarded, leave
from launch.exit_codes import MEANINGS, ExitCode, FailedError, describe_exit_codes, status_of_signal
from parallel import abort
from parallel.errors import ShardingError
from parallel.mpi_rank import find_mpi_rank
from trtrun.errors import CheckpointError, RankFailedError


def raising(error: BaseException) -> int:
    def action() -> int:
        raise error

    return guarded(action)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (CheckpointError("no weights\nhere"), 2, "trtrun: no weights here\n"),
        (ShardingError("3 ranks"), 2, "trtrun: 3 ranks\n"),
        (click.UsageError("No such option."), 2, "trtrun: No such option; see --help\n"),
        (FailedError("the disk\nis full"), 1, "trtrun: the disk is full\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("why"), 1, ""),
    ],
)
def test_what_the_user_did_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    assert raising(error) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("is_cause", [False, True])
def test_a_failed_rank_is_one_line_with_the_ranks_stacks_below(
    capsys: pytest.CaptureFixture[str], is_cause: bool
) -> None:
    failure = RankFailedError("target rank 2 (cpu:1) failed: silent for 60 s")
    failure.add_note("--- main thread of target rank 2 (cpu:1), innermost call last:\n  here")
    error: Exception = failure
    if is_cause:
        error = FailedError(str(failure))
        error.__cause__ = failure
    assert raising(error) == 1
    assert capsys.readouterr().err.splitlines() == [f"trtrun: {error}", *failure.__notes__[0].splitlines()]


def test_a_defect_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(RuntimeError("a defect")) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "aborts"), [(0, []), (2, [2])])
def test_a_rank_that_fails_aborts_its_job(monkeypatch: pytest.MonkeyPatch, status: int, aborts: list[int]) -> None:
    seen: list[int] = []
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace())
    monkeypatch.setattr(abort, "abort_at_exit", seen.append)
    with pytest.raises(SystemExit) as raised:
        leave(status)
    assert (raised.value.code, seen) == (status, aborts)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_speak_only_after_rank_0_had_its_chance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    waits: list[float | str] = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setattr(launch.jobs.mpi.job, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(launch.jobs.mpi.job, "join_world", lambda: waits.append("MPI's start"))
    assert find_mpi_rank() is not None
    launch.jobs.mpi.job.print_error("wrong")
    assert capsys.readouterr().err == "trtrun: wrong\n"
    assert waits == ([] if rank == 0 else ["MPI's start", launch.jobs.mpi.job.LAST_WORD_SECONDS])


def test_exit_codes_are_distinct_and_every_one_is_in_the_help() -> None:
    assert [(code.name, int(code)) for code in ExitCode] == [
        ("DONE", 0),
        ("FAILED", 1),
        ("REFUSED", 2),
        ("DRAINED", 3),
        ("ROWS_REFUSED", 4),
    ]
    assert list(MEANINGS) == list(ExitCode)
    for code in ExitCode:
        assert f"{int(code)} {MEANINGS[code]}" in describe_exit_codes()
    assert [status_of_signal(number) for number in (2, 9, 15)] == [130, 137, 143]


IMPORTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "launch.commands.bench":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {before})
sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = ["--version"]
from launch.console import main
main()
"""
"""The console script, with a Ctrl-C while it imports its commands."""


@pytest.mark.parametrize(("before", "status"), [("signal.default_int_handler", -signal.SIGINT), ("signal.SIG_IGN", 0)])
def test_an_interrupt_while_commands_are_imported_leaves_no_traceback(before: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(before=before)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "" and done.returncode == status
    assert ("version" in done.stdout) is (status == 0)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", b"a\\xe9\\u4f60\n"),
        ("latin-1", b"a\xe9\\u4f60\n"),
        ("ascii:replace", b"a??\n"),
        ("ascii:", b"a\\xe9\\u4f60\n"),
    ],
)
def test_texts_are_printed_whatever_the_encoding_of_the_output(encoding: str, shown: bytes) -> None:
    """A character that it lacks is its escape, unless the user has chosen something else."""
    program = "from launch.cli import guarded; raise SystemExit(guarded(lambda: print('a\\xe9\\u4f60') or 0))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


@pytest.mark.parametrize("choice", ["strict", "surrogateescape"])
def test_what_the_user_has_chosen_for_characters_that_the_output_lacks_stays(choice: str) -> None:
    """Also where it is what Python chooses by itself."""
    program = "from launch.cli import guarded; import sys; guarded(lambda: print(sys.stdout.errors) or 0)"
    environment = {**os.environ, "PYTHONIOENCODING": f"ascii:{choice}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == choice, done.stderr
