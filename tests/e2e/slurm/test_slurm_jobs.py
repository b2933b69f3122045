"""`trtrun submit` on a real Slurm of two nodes: what a job computes, where it runs, and what is refused before it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from batch import ONE_PROCESS, Rows, Run, Start, count_lines, read_rows
from cluster import Cluster, wait_for

Config = Callable[..., Path]
Prompts = Callable[..., Path]
Local = Callable[..., Rows]

pytestmark = pytest.mark.timeout(240)


def one_line(text: str) -> str:
    """The one line that a refused command says."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("trtrun: ")
    return lines[0]


def job_number(stderr: str) -> int:
    """From the line about the submission."""
    return int(stderr.split("trtrun: job ")[1].split()[0])


def test_a_job_on_one_node_is_followed_to_its_end(
    cluster: Cluster, trtrun: Run, config: Config, prompts: Prompts, folder: Path, local_rows: Local
) -> None:
    # The name and the setup line prove quoting: sbatch must hand the first on as it is, the shell must run the second.
    slurm = {
        "job_name": 'a "b" \\ \'c\' # %j $(touch bad)', "gres": "gpu:2",
        "setup": ['export MARK="it runs"', 'echo "$MARK, GPUs $CUDA_VISIBLE_DEVICES"'],
    }  # fmt: skip
    arguments = ("submit", "--config", config(1, slurm), "--follow", "--", "run", "--prompts", prompts(4, 20))
    done = trtrun(*arguments, "--output", "the rows'.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_rows(folder / "the rows'.jsonl") == local_rows(4, 20)
    job = job_number(done.stderr)
    log = folder / f"trtrun-{job}.log"
    assert f"trtrun: job {job} is submitted; log: {log}" in done.stderr
    assert done.stdout == log.read_text(encoding="utf-8")
    assert "it runs, GPUs 0,1\n" in done.stdout
    assert "trtrun: 4 prompts, 80 tokens" in done.stdout
    assert f"trtrun: job {job} COMPLETED after" in done.stderr
    assert cluster.show(job)["JobName"] == slurm["job_name"]
    assert not (folder / "bad").exists()

    shown = trtrun("status", job).stdout
    assert f"job {job} COMPLETED" in shown
    assert f"  log      {log}\n" in shown
    assert "  rows     4 of 4 done\n" in shown


def test_counted_nodes_are_filled_from_the_allocation(
    cluster: Cluster,
    trtrun: Run,
    start_trtrun: Start,
    config: Config,
    prompts: Prompts,
    folder: Path,
    local_rows: Local,
) -> None:
    file = config(2, scheduler={"max_batch_size": 2})
    arguments = ("--config", file, "--", "run", "--prompts", prompts(4, 40), "--output", "out.jsonl")
    script = trtrun("submit", "--dry-run", *arguments).stdout
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=3\n" in script
    ranks = ["rank 0 (node-1)", "rank 1 (node-1 cpu:1)", "rank 2 (node-1 cpu:0)", "rank 3 (node-2 cpu:0)"]
    assert [place for place in ranks if place not in script] == []

    followed = start_trtrun("submit", "--follow", *arguments)
    job = wait_for(lambda: cluster.call("squeue", "--noheader", "--states=R", "--format=%i"), 60, "the job runs")
    found = wait_for(lambda: len(found := cluster.ranks(int(job))) == 4 and found, 60, "all ranks are up")
    assert [found[rank][1] for rank in range(4)] == ["n1", "n1", "n1", "n2"]
    stdout, stderr = followed.communicate(timeout=150)
    assert followed.returncode == 0, stdout + stderr
    assert read_rows(folder / "out.jsonl") == local_rows(4, 40, targets=2)


def test_an_array_splits_the_rows_and_merge_joins_them(
    trtrun: Run, config: Config, prompts: Prompts, folder: Path, local_rows: Local
) -> None:
    arguments = ("--config", config(1, **ONE_PROCESS), "--array", "3%2", "--follow", "--")
    done = trtrun("submit", *arguments, "run", "--prompts", prompts(4, 20), "--output", "out.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [f"out.part-{number}-of-3.jsonl" for number in (1, 2, 3)]
    assert [len(read_rows(folder / part)) for part in parts] == [1, 1, 2]
    assert "[3] trtrun: 2 prompts" in done.stdout
    merged = done.stderr.splitlines()[-1].partition("join the parts: ")[2]
    assert all(part in merged for part in parts)
    shown = trtrun("status", job_number(done.stderr)).stdout
    assert "rows of all: 4 of 4 done" in shown

    done = trtrun("merge", "--output", "out.jsonl", *parts)
    assert done.returncode == 0, done.stderr
    assert read_rows(folder / "out.jsonl") == local_rows(4, 20)


def test_a_job_that_nobody_follows_any_more_goes_on(
    cluster: Cluster, start_trtrun: Start, trtrun: Run, config: Config, prompts: Prompts, folder: Path
) -> None:
    file = config(1, scheduler={"max_batch_size": 1}, **ONE_PROCESS)
    arguments = ("--config", file, "--follow", "--", "run", "--prompts", prompts(500, 100), "--output", "out.jsonl")
    followed = start_trtrun("submit", *arguments)
    wait_for(lambda: count_lines(folder / "out.jsonl.partial"), 60, "a row is finished")
    followed.send_signal(signal.SIGINT)
    _, stderr = followed.communicate(timeout=30)
    job = job_number(stderr)
    assert followed.returncode == 130
    assert f"trtrun: job {job} goes on; see: trtrun status {job}, or end it: trtrun cancel {job}" in stderr
    assert cluster.show(job)["JobState"] == "RUNNING"
    assert f"job {job} is RUNNING on n1" in trtrun("status", job).stdout

    assert trtrun("cancel", job, "--now").returncode == 0
    wait_for(lambda: cluster.show(job)["JobState"] == "CANCELLED", 30, "the job is ended")
    assert f"job {job} has ended already" in one_line(trtrun("cancel", job).stderr)


@pytest.mark.parametrize(
    ("slurm", "options", "reason"),
    [
        ({"gres": "gpu:5"}, (), "Requested node configuration is not available"),
        ({}, ("--partition", "none such"), "invalid partition specified: none such"),
        ({}, ("--nodelist", "n7"), "Invalid node name specified"),
        ({"extra": ["--no-such-option=1"]}, (), "unrecognized option '--no-such-option=1'"),
    ],
)
def test_what_sbatch_refuses_is_told_in_one_line(
    trtrun: Run, config: Config, prompts: Prompts, slurm: dict[str, object], options: tuple[str, ...], reason: str
) -> None:
    arguments = ("--config", config(2, slurm), *options, "--", "run", "--prompts", prompts(1, 2))
    done = trtrun("submit", *arguments, "--output", "out.jsonl")
    assert done.returncode == 2
    assert reason in one_line(done.stderr)
    assert one_line(done.stderr).startswith("trtrun: sbatch refused the job: ")


def test_a_job_that_slurm_does_not_know_is_told(trtrun: Run) -> None:
    for command in (("status", 4711), ("cancel", 4711), ("status", "4711_2")):
        done = trtrun(*command)
        assert done.returncode == 2
        assert f"Slurm does not know a job {command[1]}" in one_line(done.stderr)
    assert "'12;ls' is no job" in one_line(trtrun("status", "12;ls").stderr)
