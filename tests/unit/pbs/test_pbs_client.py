"""What is made of PBS's answers, as OpenPBS 23.06 was seen to give them, and which batch system a command talks to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import cli
from launch.commands.schedulers import find_system
from launch.jobs.batch.follow import describe_end, describe_state, follow
from launch.jobs.pbs import client
from launch.jobs.pbs.client import SEPARATOR, PbsError, PbsJob, find_jobs, read_job, read_record, recall
from launch.jobs.pbs.client import submit as submit_script

FOLDER = "/tmp/it's a $(folder) #1"
RUNNING = {
    "": "12.pbs-1", "Job_Name": "trtrun", "resources_used.walltime": "00:00:12", "job_state": "R",
    "exec_host": "n1/0*3+n2/0*3", "Output_Path": f"pbs-1:{FOLDER}/trtrun.o12", "Resource_List.nodect": "2",
    "substate": "42", "run_count": "1", "comment": "Job run at Sun Nov 29 at 18:04 on (n1:ncpus=3)+(n2:ncpus=3)",
    "Variable_List": "PBS_O_WORKDIR=/it\\'s,TRTRUN_JOB=%7B%22rows%22%3A6%2C%22output%22%3A%22a%2Cb%22%7D,PBS_O_HOST=l",
}  # fmt: skip


def job_of(**changes: str) -> PbsJob:
    """As qstat tells it."""
    return read_job({**RUNNING, **changes})


def ended(status: str, substate: str = "93") -> PbsJob:
    """After its end."""
    return job_of(job_state="F", substate=substate, Exit_status=status)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return answers(program, shell): a program of PBS on PATH that is so many lines of sh."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(program: str, shell: str) -> None:
        (tmp_path / program).write_text(f"#!/bin/sh\n{shell}\n", encoding="utf-8")
        (tmp_path / program).chmod(0o755)

    return make


def line_of(**changes: str) -> str:
    """One job as qstat writes it, for the shell."""
    name, *values = {**RUNNING, **changes}.items()
    text = SEPARATOR.join([f"Job Id: {name[1]}", *(f"{key}={value}" for key, value in values)])
    return "cat <<'END'\n" + text + "\nEND"


def test_a_running_job_is_read() -> None:
    job = job_of()
    assert (job.label, job.nodes, job.num_nodes, job.elapsed) == ("12", "n1,n2", "2", "00:00:12")
    assert job.log == Path(FOLDER) / "trtrun.o12"
    assert (job.is_running, job.has_ended, job.is_waiting) == (True, False, False)
    assert describe_state(job) == "job 12 is RUNNING on n1,n2"
    waiting = job_of(job_state="Q", comment="Not Running: Insufficient amount of resource: ncpus", exec_host="")
    assert describe_state(waiting) == "job 12 is QUEUED (Insufficient amount of resource: ncpus)"
    task = job_of(**{"": "12[3].pbs-1", "Output_Path": "l:/w/trtrun.o12.^array_index^", "comment": "Job Array Began"})
    assert (task.number, task.task, task.label, task.log) == (12, 3, "12[3]", Path("/w/trtrun.o12.3"))


@pytest.mark.parametrize(
    ("status", "substate", "state", "code"),
    [
        ("0", "92", "COMPLETED", 0),
        ("3", "93", "FAILED", 3),
        ("137", "93", "FAILED", 137),
        ("271", "91", "TERMINATED", 143),
        ("265", "93", "FAILED", 137),
        ("-29", "93", "FAILED", 1),
    ],
)
def test_the_exit_status_is_the_scripts_or_tells_of_the_signal(
    status: str, substate: str, state: str, code: int
) -> None:
    job = ended(status, substate)
    assert (job.has_ended, job.state, job.exit_status) == (True, state, code)


def test_a_job_that_never_ran_has_failed() -> None:
    job = job_of(job_state="F", substate="91")
    assert (job.state, job.exit_status) == ("TERMINATED", 1)
    assert describe_end(ended("3")).endswith(
        "exit status 3: drained, not all is done; the same command goes on with it"
    )


def test_what_submit_wrote_down_is_read_back(answers: Callable[..., None]) -> None:
    answers("qstat", line_of())
    assert read_record("12") == {"rows": 6, "output": "a,b"}
    answers("qstat", line_of(Variable_List="PBS_O_HOST=l"))
    assert read_record("12") == {}


def test_an_array_is_asked_for_by_its_brackets_and_is_its_tasks(answers: Callable[..., None]) -> None:
    tasks = [line_of(**{"": f"12[{index}].pbs-1"}) for index in (2, 1)]
    whole = "\n".join([line_of(**{"": "12[].pbs-1", "job_state": "B"}), *tasks])
    answers(
        "qstat", f'for name; do :; done\n[ "$name" = "12[]" ] || exec sh -c "echo qstat: Unknown Job Id >&2"\n{whole}'
    )
    assert [item.label for item in find_jobs("12")] == ["12[1]", "12[2]"]
    one = '[ "$name" = "12[2].pbs-1" ] || exit 1'
    answers("qstat", f"for name; do :; done\n{one}\n{tasks[0]}")
    assert (
        [item.label for item in find_jobs("12_2.pbs-1")]
        == [item.label for item in find_jobs("12[2].pbs-1")]
        == ["12[2]"]
    )


def test_a_server_without_history_is_asked_again(answers: Callable[..., None]) -> None:
    refusal = "echo 'qstat: PBS is not configured to maintain job history 12' >&2; exit 0"
    answers("qstat", f'[ "$1" != -x ] || {{ {refusal}; }}\n{line_of()}')
    assert find_jobs("12")[0].state == "RUNNING"
    answers("qstat", f'[ "$1" != -x ] || {{ {refusal}; }}\necho "qstat: Unknown Job Id 12.pbs-1" >&2; exit 153')
    with pytest.raises(PbsError, match="PBS does not know a job 12: many clusters forget"):
        find_jobs("12")


@pytest.mark.parametrize("name", ["", "12;ls", "-12", "12[", "[3]", "12[3][4]", "12 13", "all"])
def test_what_is_no_job_is_refused(name: str) -> None:
    with pytest.raises(PbsError, match="is no job"):
        find_jobs(name)


def test_a_forgotten_job_is_known_by_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "trtrun.o12"
    job = job_of(**{"": "12.l", "Output_Path": f"l:{log}"})
    assert recall(job) is None
    lines = ["trtrun: job 13 goes on, with the rows that are left", "trtrun: job 12 ends with exit status 3"]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    left = recall(job)
    assert left is not None and (left.state, left.exit_status) == ("FAILED", 3)
    asked: dict[str, list[list[PbsJob]]] = {"12": [[job]], "13": []}  # the next one has ended before it is asked for
    ended_log = log.with_name("trtrun.o13")
    ended_log.write_text("trtrun: job 13 ends with exit status 0\n", encoding="utf-8")

    def find(name: str) -> list[PbsJob]:
        if not asked[name]:
            raise PbsError(f"PBS does not know a job {name}")
        return asked[name].pop()

    monkeypatch.setattr(client, "find_jobs", find)
    assert follow("12", client) == 0
    assert [line for line in capfd.readouterr().err.splitlines() if "exit status" in line] == [
        "trtrun: job 12 FAILED after ?, exit status 3: drained, not all is done; the same command goes on with it",
        "trtrun: job 13 COMPLETED after ?, exit status 0",
    ]


def test_programs_that_are_not_there_or_of_torque_are_told(
    answers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers("qsub", "echo 'Version: 6.1.2' >&2")
    with pytest.raises(PbsError, match="this qsub is none of OpenPBS or PBS Professional"):
        submit_script("#!/bin/sh\n", tmp_path)
    answers("qsub", '[ "$1" = --version ] && echo pbs_version = 23 && exit; echo "qsub: Unknown queue" >&2; exit 1')
    with pytest.raises(PbsError, match="qsub refused the job: Unknown queue"):
        submit_script("#!/bin/sh\n", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PbsError, match="qstat is not on PATH: this is no machine of a PBS cluster"):
        CliRunner().invoke(cli, ["status", "--scheduler", "pbs", "12"], catch_exceptions=False)


def test_the_batch_system_is_the_configured_one_or_the_one_that_is_there(
    answers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_system().name == "slurm"
    answers("qstat", "")
    assert find_system().name == "pbs"
    answers("squeue", "")
    assert find_system().name == "slurm"
    assert find_system({"launch": {"pbs": {"queue": "q"}}}).name == "pbs"
    assert find_system({"launch": {"pbs": {"queue": "q"}, "slurm": {"qos": "q"}}}).name == "slurm"
    assert find_system({"launch": {"scheduler": "pbs", "slurm": {"qos": "q"}}}).name == "pbs"
    assert find_system({"launch": {"scheduler": "pbs"}}, "slurm").name == "slurm"


def test_mpiruns_words_reach_a_shell_of_the_other_node(answers: Callable[..., None], tmp_path: Path) -> None:
    """PBS starts a program without one, and mpirun's words, or all of them in one, are meant for one."""
    answers("pbs_tmrsh", 'printf "%s|" "$@"')
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "PBS_O_PATH": str(tmp_path)}
    words = ["n2", '"/a/proxy"', "--id", "1; export A"]
    done = subprocess.run(
        [sys.executable, "-m", "launch.jobs.pbs.remote_shell", *words], env=environment, capture_output=True, text=True
    )
    assert done.stdout == 'n2|/bin/sh|-c|"/a/proxy" --id 1; export A|'
