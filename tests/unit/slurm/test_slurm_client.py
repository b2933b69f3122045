"""What is made of Slurm's answers: states, exit statuses, log paths, logs that grow. Slurm itself is in
tests/e2e/slurm."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import cli
from launch.commands.batch_status import count_rows, describe
from launch.jobs.batch import follow as batch_follow
from launch.jobs.batch.follow import Tail, describe_end, describe_state, follow
from launch.jobs.slurm import client
from launch.jobs.slurm.client import SEPARATOR, SlurmError, SlurmJob, check_name, find_jobs, read_job, submit


def job_of(state: str, **changes: str) -> SlurmJob:
    """As squeue would tell it."""
    values = {
        "JobID": "12", "ArrayJobID": "12", "ArrayTaskID": "N/A", "State": state, "ReasonList": "n[1-2]",
        "exit_code": "0", "RestartCnt": "0", "TimeUsed": "1:02", "NumNodes": "2", "NodeList": "n[1-2]",
        "STDOUT": "/w/trtrun-%j.log", "WorkDir": "/w", "Name": "a | b", **changes,
    }  # fmt: skip
    return read_job("".join(f"{value}{SEPARATOR}" for value in values.values()))


def test_a_line_of_squeue_is_read() -> None:
    job = job_of("RUNNING")
    assert (job.label, job.name, job.log, job.reason) == ("12", "a | b", Path("/w/trtrun-12.log"), "")
    assert (job.is_running, job.has_ended) == (True, False)
    task = job_of("PENDING", JobID="14", ArrayTaskID="3", STDOUT="%x-%A_%a-%%.log", ReasonList="(Priority)")
    assert (task.label, task.task, task.reason) == ("12_3", 3, "Priority")
    assert task.log == Path("/w/a | b-12_3-%.log")


@pytest.mark.parametrize(
    ("state", "wait_status", "status"),
    [
        ("COMPLETED", 0, 0),
        ("FAILED", 3 << 8, 3),
        ("FAILED", 137 << 8, 137),
        ("FAILED", 9, 137),
        ("CANCELLED", 15, 143),
        ("CANCELLED", 0, 1),
        ("TIMEOUT", 0, 1),
        ("NODE_FAIL", 0, 1),
        ("OUT_OF_MEMORY", 125 << 8, 125),
    ],
)
def test_the_exit_status_is_the_scripts_or_tells_of_failure(state: str, wait_status: int, status: int) -> None:
    job = job_of(state, exit_code=str(wait_status))
    assert job.has_ended
    assert job.exit_status == status


def test_states_are_told_in_words() -> None:
    assert describe_state(job_of("RUNNING")) == "job 12 is RUNNING on n[1-2]"
    waiting = job_of("PENDING", ReasonList="(BeginTime)", RestartCnt="1", NodeList="")
    assert describe_state(waiting) == "job 12 is PENDING (BeginTime), start 2"
    assert "  nodes    2, none yet" in list(describe(waiting, {}, client))
    drained = job_of("FAILED", exit_code=str(3 << 8), ReasonList="(NonZeroExitCode)")
    assert describe_end(drained).startswith("job 12 FAILED after 1:02, exit status 3: drained, not all is done")


@pytest.mark.parametrize("name", ["", "12;ls", "-12", "12_", "_3", "12_3_4", "12 13", "all"])
def test_what_is_no_job_is_refused(name: str) -> None:
    with pytest.raises(SlurmError, match="is no job"):
        check_name(name)


@pytest.mark.parametrize("words", [("status", "12"), ("cancel", "12")])
def test_without_slurm_it_is_said(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="squeue is not on PATH"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    with pytest.raises(SlurmError, match="sbatch is not on PATH"):
        submit("#!/bin/sh\n", Path.cwd())


def test_no_word_for_slurm_can_be_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's name is checked before any program is called with it."""
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("a program was called"))
    with pytest.raises(SlurmError, match="'--all' is no job"):
        find_jobs("--all")


def test_a_growing_log_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.read() == b""
    log.write_bytes(b"one\ntw")
    assert (tail.read(), tail.read()) == (b"one\ntw", b"")
    with open(log, "ab") as file:
        file.write(b"o\n")
    assert tail.read() == b"o\n"
    log.write_bytes(b"anew\n")  # shorter: the job has begun its log again
    assert tail.read() == b"anew\n"


def test_logs_of_an_array_come_by_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log, "[2] ")
    log.write_bytes(b"one\ntw")
    assert (tail.read(), tail.read()) == (b"[2] one\n", b"")
    assert tail.read(is_last=True) == b"[2] tw\n"
    assert tail.read(is_last=True) == b""


def test_following_goes_on_through_a_requeue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    at = {"STDOUT": str(log)}
    answers = [
        job_of("PENDING", ReasonList="(Priority)", **at),
        job_of("RUNNING", **at),
        job_of("PENDING", ReasonList="(BeginTime)", RestartCnt="1", **at),
        job_of("FAILED", exit_code=str(4 << 8), RestartCnt="1", **at),
    ]

    def find(job: str) -> list[SlurmJob]:
        assert job == "12"
        if len(answers) < 4:
            with open(log, "ab") as file:
                file.write(b"%d\n" % len(answers))
        return [answers.pop(0)]

    monkeypatch.setattr(client, "find_jobs", find)
    assert follow("12", client) == 4
    shown = capfd.readouterr()
    assert shown.out == "3\n2\n1\n"
    assert shown.err.splitlines() == [
        "trtrun: job 12 is PENDING (Priority)",
        "trtrun: job 12 is RUNNING on n[1-2]",
        "trtrun: job 12 is PENDING (BeginTime), start 2",
        "trtrun: job 12 FAILED after 1:02, exit status 4",
    ]


def test_a_controller_that_is_away_for_a_moment_does_not_end_the_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(job: str) -> list[SlurmJob]:
        asked.append(job)
        if len(asked) in (1, 2):
            raise SlurmError("squeue: Socket timed out on send/recv operation")
        return [job_of("COMPLETED", STDOUT=str(tmp_path / "log"))]

    monkeypatch.setattr(client, "find_jobs", find)
    assert (follow("12", client), len(asked)) == (0, 3)


def test_a_controller_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(job: str) -> list[SlurmJob]:
        raise SlurmError("squeue: Unable to contact slurm controller")

    for name in ("FIRST_ASK_SECONDS", "LAST_ASK_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(batch_follow, name, 0.001)
    monkeypatch.setattr(client, "find_jobs", find)
    with pytest.raises(SlurmError, match="Unable to contact"):
        follow("12", client)


def test_rows_are_counted_in_the_working_file_first(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    assert count_rows(output) == 0
    output.write_bytes(b"{}\n{}\n{}\n")
    assert count_rows(output) == 3
    (tmp_path / "o.jsonl.partial").write_bytes(b'{}\n{"index"')
    assert count_rows(output) == 1


def test_signals_have_shell_statuses() -> None:
    job = job_of("FAILED", exit_code=str(signal.SIGSEGV | 0x80))
    assert os.WCOREDUMP(job.wait_status)
    assert job.exit_status == 139
