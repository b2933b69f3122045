"""A run whose processes are killed at twenty random moments, each time gone on with: no row is lost, none comes twice.

The moments and the victims are drawn from a seed that a failing test shows; TRTRUN_TEST_SEED sets it.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import FIXED, ROOT, Run, command_environment, command_words, is_alive, ranks_below, write_rows
from drains import PATIENCE, wait_until, written_indexes
from output_rows import read_rows, without_drafting

PAIR = ROOT / "launch" / "configs" / "cpu_pair.yaml"
KILLS = 20
SIZE = 4
START_SECONDS = 3.0
"""Kills of ranks that only start come within this time after all of them are there."""

PROMPTS = [
    {
        "prompt": f"def f{index}(",
        "max_tokens": 20 + index * 7 % 61,  # long enough to be killed in
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": index,
    }
    for index in range(240)
]
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Kill:
    """What to kill, and when.

    Attributes:
        victim: a rank, or None for mpirun.
        num_rows: rows that this run must have finished before; 0 for a kill while ranks start.
        delay: seconds after that.
    """

    victim: int | None
    num_rows: int
    delay: float

    @classmethod
    def draw(cls, generator: random.Random, number: int) -> Kill:
        """Every third kill at the start; mpirun as often as each rank."""
        victim = generator.choice([None, *range(SIZE)])
        if number % 3 == 0:
            return cls(victim, 0, generator.uniform(0, START_SECONDS))
        return cls(victim, generator.randint(1, 6), generator.uniform(0, 0.05))


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def run_and_kill(words: list[str], working: Path, kill: Kill) -> tuple[int, str]:
    """Start a run, kill one of its processes while it lives, and see all of them end; exit status and stderr."""
    with subprocess.Popen(
        words, env=command_environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wanted = len(written_indexes(working)) + kill.num_rows
            wait_until(lambda: len(ranks_below(process.pid)) == SIZE, process, "all ranks", pause=0.05)
            wait_until(lambda: len(written_indexes(working)) >= wanted, process, f"{wanted} rows")
            ranks = ranks_below(process.pid)
            assert sorted(ranks) == list(range(SIZE))
            with pytest.raises(subprocess.TimeoutExpired):  # else it ended by itself, and nothing is killed
                process.wait(timeout=kill.delay)
            watched = [os.pidfd_open(rank) for rank in ranks.values()]
            victim = parent_of(ranks[0]) if kill.victim is None else ranks[kill.victim]
            assert is_alive(victim)
            os.kill(victim, signal.SIGKILL)
            _, errors = process.communicate(timeout=PATIENCE)
            for rank in watched:
                ended, _, _ = select.select([rank], [], [], PATIENCE)
                assert ended, "a rank outlived its job"
                os.close(rank)
        except BaseException:
            process.kill()  # the kernel takes its ranks along
            raise
    return process.returncode, errors


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments_lose_no_row_and_repeat_none(trtrun: Run, tmp_path: Path) -> None:
    seed = int(os.environ.get("TRTRUN_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"TRTRUN_TEST_SEED={seed}")
    generator = random.Random(seed)
    output, working = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    arguments = [
        "run",
        "--config",
        str(PAIR),
        *FIXED,
        "--prompts",
        str(write_rows(tmp_path / "prompts.jsonl", list(PROMPTS))),
    ]
    words = [*command_words(), *arguments, "--output", str(output)]
    kept: set[int] = set()
    statuses: Counter[int] = Counter()
    runs_with_progress = 0
    for number in range(KILLS):
        kill = Kill.draw(generator, number)
        status, errors = run_and_kill([*words, *(["--resume"] if number else [])], working, kill)
        now = written_indexes(working)
        print(f"{number}: {kill}: status {status}, {len(now)} rows: {errors.strip()}")
        assert status != 0 and not output.exists()
        assert "another run" not in errors and "Traceback" not in errors
        assert kept <= now, "a finished row was lost"
        assert len(now) >= len(kept) + kill.num_rows
        statuses[status] += 1
        runs_with_progress += kept < now
        kept = now
    assert statuses[KILLED] >= KILLS * 3 // 4, f"most ends should be those of the kills: {statuses}"
    assert runs_with_progress >= KILLS // 2
    assert len(kept) < len(PROMPTS), "nothing was left for the last run"

    done = trtrun(*arguments, "--output", output, "--resume", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert f"{len(PROMPTS) - len(kept)} prompts, " in done.stderr
    assert f"; {len(kept)} rows were done before" in done.stderr
    assert not working.exists()
    undisturbed = trtrun(*arguments, "--output", tmp_path / "undisturbed.jsonl", timeout=PATIENCE)
    assert undisturbed.returncode == 0, undisturbed.stderr
    rows = read_rows(output)
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert without_drafting(rows) == without_drafting(read_rows(tmp_path / "undisturbed.jsonl"))
