"""Jobs on a real Slurm that do not end by themselves: cancelled, warned, killed, their node lost. No row is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from batch import (
    ONE_PROCESS,
    ROOT,
    Rows,
    Run,
    count_lines,
    make_folder,
    read_rows,
    run_command,
    write_config,
    write_prompts,
)
from cluster import Cluster, wait_for

from launch.jobs.slurm.client import ENDED

Config = Callable[..., Path]
Prompts = Callable[..., Path]
Local = Callable[[int, int], Rows]

pytestmark = pytest.mark.timeout(600)
ONE_BY_ONE = {"max_batch_size": 1}
"""Rows that run one after another finish one after another, so that some are left at any moment."""
SLOW, SLOW_ALONE = (
    f'[ -e hurry ] || export PYTHONPATH="{ROOT}/tests/e2e/cli/faults:$PYTHONPATH" TRTRUN_TEST_FAULT="{rank} slow"'
    for rank in ("2", "alone")
)
"""What a job of three ranks, or of one process, does first: its target sleeps in each round, however fast the machine
is, until `hurry` says that it need not. A row of 80 tokens takes 0.7 s at least, and hardly any of a core."""


def hurry(folder: Path) -> None:
    """Starts of a job from now on are not slow."""
    (folder / "hurry").touch()


class Jobs:
    """Submits the same run again and again, as a user does who wants its rows."""

    def __init__(self, cluster: Cluster, folder: Path, file: Path, prompts: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._file = file
        self._arguments = ("--config", file, "--", "run", "--prompts", prompts, "--output", "out.jsonl")

    def submit(self, *options: object) -> int:
        """Return the job's number, which is all that standard output holds."""
        done = run_command(self._cluster, self._folder, ["submit", *options, *self._arguments])
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def wait_for_rows(self, job: int, count: int) -> None:
        """Until the job, which must be running or about to, has finished so many rows."""

        def are_there() -> bool:
            assert self._cluster.show(job)["JobState"] in ("PENDING", "RUNNING"), self.log(job)
            return count_lines(self._folder / "out.jsonl.partial") >= count

        wait_for(are_there, 120, f"{count} rows are finished")

    def wait_for_state(self, job: int, *states: str) -> dict[str, str]:
        """Until the job is in one of the states, or has ended in another; what Slurm says of it then."""

        def show() -> dict[str, str] | None:
            shown = self._cluster.show(job)
            return shown if shown["JobState"] in (*states, *ENDED) else None

        return wait_for(show, 150, f"job {job} is {' or '.join(states)}")

    def log(self, job: int) -> str:
        """All that the job said."""
        return (self._folder / f"trtrun-{job}.log").read_text(encoding="utf-8")

    def change(self, **sections: Any) -> None:
        """Another configuration for starts from now on: rows depend neither on who shares their batch nor on ranks."""
        values = json.loads(self._file.read_text(encoding="utf-8"))
        self._file.write_text(json.dumps(values | sections), encoding="utf-8")

    def finish(self, rows: Rows) -> None:
        """Submit once more, for one process, and see that the output is whole."""
        self.change(**ONE_PROCESS)
        job = self.submit()
        assert self.wait_for_state(job)["JobState"] == "COMPLETED", self.log(job)
        assert "rows were done before" in self.log(job)
        assert read_rows(self._folder / "out.jsonl") == rows
        assert not (self._folder / "out.jsonl.partial").exists()


@pytest.fixture
def jobs(cluster: Cluster, folder: Path, prompts: Prompts) -> Callable[..., Jobs]:
    """Return make(config, count, max_tokens)."""

    def make(file: Path, count: int, max_tokens: int) -> Jobs:
        return Jobs(cluster, folder, file, prompts(count, max_tokens))

    return make


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, local_rows: Local) -> Iterator[Future[None]]:
    """What becomes of a job that reaches its time limit, from the first test on: Slurm looks at limits every half
    minute, and other tests need not wait for that."""
    folder = make_folder(tmp_path_factory.mktemp("limited"))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(reach_a_time_limit, cluster, folder, local_rows)


def reach_a_time_limit(cluster: Cluster, folder: Path, local_rows: Local) -> None:
    """A job drains, is requeued and completes."""
    slurm = {"requeue": True, "signal_seconds": 120, "setup": [SLOW_ALONE]}
    count = 64
    file = write_config(folder, 1, slurm, scheduler=ONE_BY_ONE, launch={"drain_seconds": 5}, **ONE_PROCESS)
    run = Jobs(cluster, folder, file, write_prompts(folder, count, 80))
    job = run.submit()
    run.wait_for_rows(job, 2)
    # Slurm counts limits in minutes and looks at them every half minute, in which less than the 64 rows get done. From
    # now on the end is near enough for the warning, and more than a minute away.
    minutes = int(cluster.show(job)["RunTime"].split(":")[1])
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    shown = run.wait_for_state(job, "PENDING")
    assert shown["JobState"] == "PENDING", run.log(job)
    kept = count_lines(folder / "out.jsonl.partial")
    assert 2 <= kept < count
    hurry(folder)
    run.change(scheduler={"max_batch_size": 32})
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    ended = run.wait_for_state(job)
    log = run.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert "trtrun: SIGUSR1: no more prompts are begun" in log
    assert "trtrun: the job goes back into the queue, for the rows that are left\n" in log
    assert "start 2\n" in log
    assert f"{kept} rows were done before" in log
    assert read_rows(folder / "out.jsonl") == local_rows(count, 80)


def test_a_cancelled_job_drains_and_the_next_one_goes_on(
    trtrun: Run, config: Config, jobs: Callable[..., Jobs], folder: Path, local_rows: Local, limited: Future[None]
) -> None:
    # It would be requeued after Slurm's warning, but not when a user wants it to end.
    slurm = {"requeue": True, "signal_seconds": 60, "setup": [SLOW_ALONE]}
    run = jobs(config(1, slurm, scheduler=ONE_BY_ONE, **ONE_PROCESS), 8, 100)
    job = run.submit()
    run.wait_for_rows(job, 1)
    done = trtrun("cancel", job)
    ended = run.wait_for_state(job, "PENDING")
    said = f"trtrun: job {job} is asked to end, and what is in flight may finish; see: trtrun status {job}\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0")
    shown = trtrun("status", job).stdout
    assert f"job {job} FAILED after" in shown
    assert "exit status 3: drained" in shown
    hurry(folder)
    run.finish(local_rows(8, 100))


def test_a_job_that_waits_is_taken_out_of_the_queue(
    cluster: Cluster, trtrun: Run, config: Config, jobs: Callable[..., Jobs]
) -> None:
    run = jobs(config(1, {"extra": ["--begin=now+1hour"]}), 1, 2)
    job = run.submit()
    assert f"job {job} is PENDING (BeginTime)" in trtrun("status", job).stdout
    done = trtrun("cancel", job)
    assert (done.returncode, done.stderr) == (0, f"trtrun: job {job} is ended\n")
    assert cluster.show(job)["JobState"] == "CANCELLED"


def test_a_job_that_gets_no_further_is_not_requeued(
    cluster: Cluster, config: Config, jobs: Callable[..., Jobs]
) -> None:
    slurm = {"requeue": True, "signal_seconds": 60, "setup": ["SLURM_RESTART_COUNT=3 # as if it were the fourth start"]}
    run = jobs(config(1, slurm, scheduler=ONE_BY_ONE, launch={"drain_seconds": 0.1}), 1, 4000)
    job = run.submit()
    wait_for(lambda: len(cluster.ranks(job)) == 3, 60, "the ranks are up")
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    ended = run.wait_for_state(job, "PENDING")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0")
    assert "trtrun: no rows were finished, nor would many be in the next start: not requeued" in run.log(job)


def test_a_killed_rank_ends_the_job_and_what_is_done_stays(
    cluster: Cluster, trtrun: Run, config: Config, jobs: Callable[..., Jobs], folder: Path, local_rows: Local
) -> None:
    """The next job would go on as behind one that is cancelled."""
    run = jobs(config(1, {"setup": [SLOW]}, scheduler=ONE_BY_ONE), 8, 100)
    job = run.submit()
    run.wait_for_rows(job, 1)
    process, _ = cluster.ranks(job)[2]
    os.kill(process, signal.SIGKILL)
    ended = run.wait_for_state(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "137:0"), run.log(job)
    assert "target rank 2 (n1 cpu:0)" in run.log(job)
    assert f"job {job} FAILED" in trtrun("status", job).stdout
    kept = read_rows(folder / "out.jsonl.partial")
    assert kept and kept == local_rows(8, 100)[: len(kept)]


def test_a_job_whose_node_is_set_down_starts_again_when_it_is_back(
    cluster: Cluster, config: Config, jobs: Callable[..., Jobs], folder: Path
) -> None:
    slurm = {"requeue": True, "signal_seconds": 60}
    target = {"model": "asset:target", "devices": {"n1": ["cpu:0"], "n2": ["cpu:0"]}}
    draft = {"model": "asset:draft", "devices": {"n2": ["cpu:1"]}}
    run = jobs(config(2, slurm, scheduler=ONE_BY_ONE, target=target, draft=draft), 6, 40)
    job = run.submit()
    run.wait_for_rows(job, 1)
    assert cluster.show(job)["ReqNodeList"] == "n[1-2]"
    assert [node for _, (_, node) in sorted(cluster.ranks(job).items())] == ["n1", "n2", "n1", "n2"]
    cluster.set_node("n2", "DOWN")
    try:
        run.wait_for_state(job, "PENDING")
    finally:
        cluster.set_node("n2", "RESUME")
    ended = run.wait_for_state(job)
    log = run.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert "DUE TO NODE FAILURE" in log
    assert "rows were done before" in log
    assert len(read_rows(folder / "out.jsonl")) == 6


def test_a_training_run_that_is_warned_is_requeued_and_goes_on_behind_its_last_step(
    cluster: Cluster, trtrun: Run, config: Config, folder: Path
) -> None:
    rows = [{"prompt_token_ids": [5, 6 + row], "token_ids": [*range(7, 40)], "temperature": 0.0} for row in range(8)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    file = config(1, {"requeue": True, "signal_seconds": 60}, **ONE_PROCESS)
    settings = ("--method", "medusa", "--num-tokens", 2, "--batch-size", 2, "--heldout-rows", 0, "--steps", 100000)
    words = ("train-drafter", "--data", "data.jsonl", "--output", "the heads", *settings)
    submitted = trtrun("submit", "--config", file, "--", *words)
    assert submitted.returncode == 0, submitted.stderr
    job, log = int(submitted.stdout), folder / f"trtrun-{int(submitted.stdout)}.log"

    def has_said(text: str) -> bool:
        assert cluster.show(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), log.read_text(encoding="utf-8")
        return log.exists() and text in log.read_text(encoding="utf-8")

    metrics = folder / "the heads" / "training" / "metrics.jsonl"
    wait_for(lambda: has_said("") and count_lines(metrics) >= 2, 120, "two steps are done")
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    wait_for(lambda: has_said("goes on behind step"), 150, "the job has started again")
    said = log.read_text(encoding="utf-8")
    done = int(said.split("trtrun: SIGUSR1: ")[1].split()[0])
    assert "trtrun: the job goes back into the queue, for the steps that are left\n" in said
    assert f"medusa: goes on behind step {done} of 100000 steps, with 8 rows on 1 rank\n" in said
    assert trtrun("cancel", job).returncode == 0
    ended = wait_for(lambda: (one := cluster.show(job))["JobState"] in ENDED and one, 60, "the job has ended")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "1")
    assert f"  steps    {count_lines(metrics)} done\n" in trtrun("status", job).stdout


def test_processes_that_srun_leaves_alone_say_so_and_fail(
    trtrun: Run, config: Config, prompts: Prompts, folder: Path
) -> None:
    """The wheel of Open MPI does not understand it: each of its ranks would be a world of its own, and call it success.
    MPICH does, and works (test_slurm_containers.py)."""
    file = config(2, {"launcher": "srun", "srun_mpi": "pmi2"})
    arguments = ("--config", file, "--follow", "--", "run", "--prompts", prompts(1, 2), "--output", "out.jsonl")
    done = trtrun("submit", *arguments)
    assert done.returncode not in (0, 3), done.stdout
    assert "srun" in done.stdout
    assert "do not know each other" in done.stdout or "MPI sees a world of 1" in done.stdout
    assert not (folder / "out.jsonl").exists()


def test_a_job_that_reaches_its_time_limit_drains_requeues_and_completes(limited: Future[None]) -> None:
    """Which it has done beside the tests above."""
    limited.result()
