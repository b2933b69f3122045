"""A run whose processes are killed at random moments, each time gone on with: no row is lost, none comes twice.

A draft rank that is killed once rounds run costs drafts alone: the run goes on, and another process is killed.

The moments and the victims are drawn from a seed that a failing test shows; TRTRUN_TEST_SEED sets it, and
TRTRUN_TEST_KILLS how many runs are killed: a few in the suite, as many as one likes for a soak.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import FIXED, ROOT, Run, is_alive, parent_of, write_rows
from drains import PATIENCE, wait_until, written_indexes
from forked_commands import ranks_below
from output_rows import read_rows, without_drafting

PAIR = ROOT / "launch" / "configs" / "cpu_pair.yaml"
RUNS = int(os.environ.get("TRTRUN_TEST_KILLS") or 2)
SIZE = 3
THREE_RANKS = ("--set", 'target.devices=["cpu:1"]', *FIXED)
ONE_PROCESS = ("--set", 'target.devices=["cpu:0"]', *FIXED)
"""Writes the same rows."""

DRAFT = 1
NEEDED = (None, 0, 2)
"""What a run cannot do without: mpirun, and the ranks beside the draft's."""

ROWS_WITHOUT_DRAFTS = 3
START_SECONDS = 0.5
"""Kills of ranks that only start come within this time after all of them are there."""

PROMPTS = [
    {
        "prompt": f"def f{index}(",
        "max_tokens": 20 + index * 7 % 61,  # long enough to be killed in
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": index,
    }
    for index in range(30 * RUNS)
]
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Kill:
    """What to kill, and when.

    Attributes:
        victim: a rank, or None for mpirun.
        num_rows: rows that this run must have finished before; 0 for a kill while ranks start.
        delay: seconds after that.
        after_draft: whether the draft's rank is killed before, and the run goes on.
    """

    victim: int | None
    num_rows: int
    delay: float
    after_draft: bool

    @classmethod
    def draw(cls, generator: random.Random, number: int) -> Kill:
        """Every third kill comes at the start, every third behind the draft's; mpirun is hit as often as each rank."""
        victim = generator.choice(NEEDED)
        if number % 3 == 0:
            return cls(victim, 0, generator.uniform(0, START_SECONDS), generator.random() < 0.2)
        return cls(victim, generator.randint(1, 6), generator.uniform(0, 0.05), number % 3 == 1)


def goes_on_without(draft: int, process: subprocess.Popen[str], working: Path, kill: Kill) -> bool:
    """Kill the draft's rank; whether the run goes on, as it must once rounds run: then some more rows are there."""
    wanted = len(written_indexes(working)) + ROWS_WITHOUT_DRAFTS
    os.kill(draft, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while len(written_indexes(working)) < wanted:
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for rows without drafts"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
            assert kill.num_rows == 0, "the run has ended with its draft"
            return False
    return True


def kill_one(process: subprocess.Popen[str], working: Path, kill: Kill) -> tuple[int, str]:
    """Kill one process of a run that has begun, and see all of them end; exit status and stderr."""
    wanted = len(written_indexes(working)) + kill.num_rows
    wait_until(lambda: len(ranks_below(process.pid)) == SIZE, process, "all ranks", pause=0.05)
    wait_until(lambda: len(written_indexes(working)) >= wanted, process, f"{wanted} rows")
    ranks = ranks_below(process.pid)
    assert sorted(ranks) == list(range(SIZE))
    with pytest.raises(subprocess.TimeoutExpired):  # else it ended by itself, and nothing is killed
        process.wait(timeout=kill.delay)
    watched = [os.pidfd_open(rank) for rank in ranks.values()]
    if not kill.after_draft or goes_on_without(ranks[DRAFT], process, working, kill):
        victim = parent_of(ranks[0]) if kill.victim is None else ranks[kill.victim]
        assert is_alive(victim)
        os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    for rank in watched:
        ended, _, _ = select.select([rank], [], [], PATIENCE)
        assert ended, "a rank outlived its job"
        os.close(rank)
    return process.returncode, errors


@pytest.mark.timeout(1200)
def test_kills_at_random_moments_lose_no_row_and_repeat_none(
    trtrun: Run, start_trtrun: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    seed = int(os.environ.get("TRTRUN_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"TRTRUN_TEST_SEED={seed}")
    generator = random.Random(seed)
    output, working = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    prompts = str(write_rows(tmp_path / "prompts.jsonl", list(PROMPTS)))
    arguments = ["run", "--config", str(PAIR), "--prompts", prompts]
    words = [*arguments, *THREE_RANKS, "--output", str(output)]
    kept: set[int] = set()
    statuses: Counter[int] = Counter()
    runs_with_progress = 0
    for number in range(RUNS):
        kill = Kill.draw(generator, number)
        status, errors = kill_one(start_trtrun(*words, *(["--resume"] if number else [])), working, kill)
        now = written_indexes(working)
        print(f"{number}: {kill}: status {status}, {len(now)} rows: {errors.strip()}")
        assert status != 0 and not output.exists()
        assert "another run" not in errors and "Traceback" not in errors
        assert kept <= now, "a finished row was lost"
        assert len(now) >= len(kept) + kill.num_rows
        assert kill.after_draft or "without drafts" not in errors
        statuses[status] += 1
        runs_with_progress += kept < now
        kept = now
    assert statuses[KILLED] >= RUNS * 3 // 4, f"most ends should be those of the kills: {statuses}"
    assert runs_with_progress >= RUNS // 2
    assert len(kept) < len(PROMPTS), "nothing was left for the last run"

    done = trtrun(*arguments, *ONE_PROCESS, "--output", output, "--resume", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert f"{len(PROMPTS) - len(kept)} prompts, " in done.stderr
    assert f"; {len(kept)} rows were done before" in done.stderr
    assert not working.exists()
    undisturbed = trtrun(*arguments, *ONE_PROCESS, "--output", tmp_path / "undisturbed.jsonl", timeout=PATIENCE)
    assert undisturbed.returncode == 0, undisturbed.stderr
    rows = read_rows(output)
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert without_drafting(rows) == without_drafting(read_rows(tmp_path / "undisturbed.jsonl"))
