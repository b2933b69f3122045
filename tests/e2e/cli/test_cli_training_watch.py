"""`trtrun train-drafter` on two ranks of which one is stopped, hangs or fails: one line names it, the job ends, and
`--resume` goes on from the last checkpoint."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import Configs, Run, with_fault, write_rows
from drains import rank_of, wait_until
from output_rows import read_rows

from launch.train.watch import STILL_FACTOR

STEPS = 40
TEXTS = ["def main(args):\n    return args\n", "import os\nimport sys\n", "for i in range(10):\n    print(i)\n"]
TRAIN = (
    *("train-drafter", "--method", "eagle3", "--num-tokens", 2, "--steps", STEPS, "--batch-size", 4),
    *("--micro-batch-size", 2, "--max-length", 32, "--warmup-steps", 2, "--heldout-rows", 0, "--checkpoint-steps", 2),
)
NAMES = ["training rank 0 (cpu:0)", "training rank 1 (cpu:1)"]
IN_A_STEP = r"last seen in step \d+ \([a-z ]+\)"


@pytest.fixture
def words(config: Configs, tmp_path: Path) -> tuple[object, ...]:
    """A command that trains a head for the shipped target in `tmp_path / "head"`, and hears quickly of silent ranks."""
    tokens = [list((text * 4).encode()) for text in TEXTS]
    rows = [{"prompt_token_ids": row[:4], "token_ids": row[4:], "temperature": 0.0} for row in tokens]
    data = write_rows(tmp_path / "data.jsonl", rows * 4)
    path = config({"target": ["cpu:0", "cpu:1"]}, target={"model": "asset:target"})
    more = ("--set", "launch.heartbeat_seconds=2", "--data", data, "--output", tmp_path / "head")
    return (*TRAIN, "--config", path, *more)


def own_lines(stderr: str) -> list[str]:
    """What trtrun said of the end, without the stacks below it."""
    return [line for line in stderr.splitlines() if line.startswith("trtrun: ") and "begins" not in line]


@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_ends_the_run_and_resume_goes_on_until_a_rank_fails(
    words: tuple[object, ...], trtrun: Run, start_trtrun: Callable[..., Any], tmp_path: Path, rank: int
) -> None:
    process = start_trtrun(*words)
    metrics = tmp_path / "head" / "training" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, process, "five steps")
    stopped = rank_of(process.pid, rank)
    assert stopped is not None
    handle = os.pidfd_open(stopped)
    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):  # else a run that does not end it leaves it for ever
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    assert process.returncode == 1, stderr
    (line,) = own_lines(stderr)
    told = rf", as told by {re.escape(NAMES[1])}" if rank == 0 else r"(; the job is in step \d+)?"
    assert re.fullmatch(rf"trtrun: {re.escape(NAMES[rank])} failed: silent for 2 s, {IN_A_STEP}{told}", line), line
    assert metrics.read_bytes().count(b"\n") < STEPS
    assert not (tmp_path / "head" / "config.json").exists()
    # The next run goes on from there, until an exception ends it on this rank alone.
    done = trtrun(*words, "--resume", env=with_fault(f"{rank} raise-in-step"))
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in own_lines(done.stderr) if "goes on" not in line]
    assert line == f"trtrun: {NAMES[rank]} failed: MemoryError: no room for this batch"
    going_on = re.search(rf"goes on behind step ([1-9]\d*) of {STEPS} steps", done.stderr)
    assert going_on is not None, done.stderr
    steps = [row["step"] for row in read_rows(metrics)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > int(going_on[1])
    assert (tmp_path / "head" / "training" / "state.safetensors").exists()


def test_a_rank_0_that_hangs_in_a_step_is_named_and_not_the_one_that_waits_for_it(
    words: tuple[object, ...], trtrun: Run, tmp_path: Path
) -> None:
    """It beats, so that only its standing still tells, which may last longer: ten times, and three in this test."""
    assert STILL_FACTOR == 10
    done = trtrun(*words, env=with_fault("0 endless-step"))
    assert done.returncode == 1, done.stderr
    (line,) = own_lines(done.stderr)
    cause = "stands still in step 4 (training) for longer than 6 s"
    assert line == f"trtrun: {NAMES[0]} failed: {cause}"
    assert done.stderr.index(f"main thread of {NAMES[0]}") == done.stderr.index("main thread of ")
    assert (tmp_path / "head" / "training" / "state.safetensors").exists()
