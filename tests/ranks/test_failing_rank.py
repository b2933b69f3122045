"""The proof that a test which fails on any one rank fails the command, and that the command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests/ranks/programs/failing_case.py"
PYTEST = ("-m", "pytest", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", PROGRAM)


def _environment(kind: str, rank: int) -> dict[str, str]:
    return {"FAILING_KIND": kind, "FAILING_RANK": str(rank)}


def test_the_same_case_passes_when_no_rank_fails(run_ranks) -> None:
    done = run_ranks(3, *PYTEST, env=_environment("none", -1), forked=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("rank", [0, 2])
def test_an_assertion_that_fails_on_one_rank_fails_the_command(run_ranks, rank: int) -> None:
    done = run_ranks(3, *PYTEST, env=_environment("assert", rank), forked=True)
    assert done.returncode != 0
    assert f"===== rank {rank} of 3: {PROGRAM}::test_failing failed in call" in done.stderr
    assert "broken in the test" in done.stderr


@pytest.mark.parametrize(
    ("kind", "rank", "message"),
    [
        ("setup", 1, "broken while setting up"),
        ("teardown", 2, "broken while tearing down"),
        ("collection", 2, "broken while collecting"),
        ("skip", 0, "went differently on the ranks"),
        ("hang", 1, "hung for 5 s"),
        ("exit", 2, ""),
    ],
)
def test_every_way_to_fail_on_one_rank_fails_the_command(run_ranks, kind: str, rank: int, message: str) -> None:
    done = run_ranks(3, *PYTEST, env=_environment(kind, rank), forked=True)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_test_script_fails_when_one_rank_does() -> None:
    environment = os.environ | _environment("assert", 1) | {"TRTRUN_PYTHON": sys.executable, "TRTRUN_TEST_RANKS": "2"}
    environment.pop("TRTRUN_TEST_TALLY", None)
    done = subprocess.run(
        ["bash", "scripts/test.sh", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode != 0
    last_line = done.stdout.strip().splitlines()[-1]
    assert "1 passed, 1 failed" in last_line
