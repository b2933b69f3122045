"""`trtrun submit` for PBS: a job of real ranks under `tests/helpers/stand_in_pbs.py`, warned, submitted again by
itself, and followed to its end. OpenPBS itself is nothing that can be installed for a test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in_pbs
from batch import ONE_PROCESS, Rows, command_environment, command_words, count_lines, read_rows, run_command
from batch import write_config as write_slurm_config
from cluster import wait_for

SLOW = (
    f'[ -e hurry ] || export PYTHONPATH="{Path(__file__).parents[1]}/cli/faults:$PYTHONPATH" TRTRUN_TEST_FAULT="2 slow"'
)
SLEEP = """\
#!/bin/sh
# The job's timer: its time comes when the test says so.
while [ ! -e "$HOME/warn.$PBS_JOBID" ]; do /bin/sleep 0.05; done
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A PBS of one node: its folder, and its environment, in which nothing else is a batch system."""
    folder = tmp_path / "pbs"
    environment = stand_in_pbs.install(folder)
    (folder / "bin").mkdir()
    (folder / "bin" / "sleep").write_text(SLEEP, encoding="utf-8")
    (folder / "bin" / "sleep").chmod(0o755)
    (folder / ".bash_profile").write_text(f'PATH="{folder}/bin:$PATH"\n', encoding="utf-8")
    yield SimpleNamespace(folder=folder, environment=environment)
    for job in folder.glob("*.job"):
        session = stand_in_pbs.read(folder, job.stem).get("session_id", "")
        stand_in_pbs.signal_session(session, stand_in_pbs.signal.SIGKILL)


def test_a_warned_job_of_several_ranks_goes_on_as_the_next_one(
    pbs: SimpleNamespace, folder: Path, prompts: Callable[..., Path], local_rows: Callable[..., Rows]
) -> None:
    file = write_slurm_config(folder, 1, scheduler={"max_batch_size": 1})
    values = json.loads(file.read_text(encoding="utf-8"))
    section = {"walltime": "1:00:00", "requeue": True, "signal_seconds": 60, "setup": [SLOW]}
    values["launch"] = {"pbs": section, "drain_seconds": 0.1}
    file.write_text(json.dumps(values), encoding="utf-8")
    words = ["submit", "--config", file, "--follow", "--", "run", "--prompts", prompts(12, 60), "--output", "out.jsonl"]
    followed = subprocess.Popen(
        [*command_words(), *map(str, words)], env=command_environment(pbs), cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    done = folder / "out.jsonl.partial"
    wait_for(lambda: count_lines(done) or followed.poll() is not None, 120, "a row is finished")
    assert count_lines(done), followed.communicate()
    shown = run_command(pbs, folder, ["status", 0]).stdout  # type: ignore[arg-type]
    assert f"job 0 is RUNNING on {stand_in_pbs.HOST}\n" in shown
    assert f"  log      {folder}/trtrun.o0\n" in shown
    assert " of 12 done\n" in shown
    (folder / "hurry").touch()  # the next job has one process, and is not slow
    file.write_text(json.dumps(values | ONE_PROCESS | {"scheduler": {}}), encoding="utf-8")
    (pbs.folder / "warn.0.n1").touch()
    stdout, stderr = followed.communicate(timeout=150)
    assert followed.returncode == 0, stdout + stderr
    assert "trtrun: drained after SIGUSR1" in stdout
    assert "trtrun: job 1 goes on, with the rows that are left\n" in stdout
    assert "start 2\n" in stdout
    assert "rows were done before" in stdout or "row was done before" in stdout
    assert "trtrun: job 0 FAILED after ?, exit status 3: drained" in stderr
    assert "trtrun: job 1 COMPLETED after ?, exit status 0" in stderr
    assert read_rows(folder / "out.jsonl") == local_rows(12, 60)

    # What PBS sends to every process of a job reaches nobody but the batch script.
    (folder / "hurry").unlink()
    file.write_text(json.dumps(values | ONE_PROCESS), encoding="utf-8")
    (folder / "out.jsonl").unlink()
    submitted = run_command(pbs, folder, ["submit", *map(str, words[1:3]), *map(str, words[4:])])  # type: ignore[arg-type]
    assert submitted.returncode == 0, submitted.stderr
    (pbs.folder / "history").touch()
    wait_for(lambda: count_lines(done), 120, "a row is finished")
    assert run_command(pbs, folder, ["cancel", 2]).returncode == 0  # type: ignore[arg-type]
    wait_for(lambda: stand_in_pbs.read(pbs.folder, "2.n1")["job_state"] == "F", 60, "the job has ended")
    assert "job 2 FAILED after 0:00, exit status 3: drained" in run_command(pbs, folder, ["status", 2]).stdout  # type: ignore[arg-type]
    assert "goes on, with" not in (folder / "trtrun.o2").read_text(encoding="utf-8")
