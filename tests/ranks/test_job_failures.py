"""Jobs that end badly: an exception or a kill on any rank, a user's program that goes wrong, a world of another size.

Each starts a real job of a draft and a target rank beside the orchestrator, or of two target ranks, written against the
Python API (`programs/job_case.py`). The bounds on time only tell an end from a hang; they are no measurement.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from pipelines import noisy_copy

PROGRAM = "tests/ranks/programs/job_case.py"
SOON = 15.0
TIMEOUT = 150.0

RunRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the program: a pair with a long context."""
    folder = tmp_path_factory.mktemp("models")
    target = make_checkpoint(folder / "target", num_hidden_layers=2, max_position_embeddings=65536)
    draft = noisy_copy(folder / "draft", target, 0.05)
    return {"JOB_TARGET": str(target), "JOB_DRAFT": str(draft)}


def named_failures(text: str) -> list[str]:
    """The messages of the RankFailedErrors in a text. mpirun ends its own with a NUL byte, which may precede a line."""
    words = "trtrun.errors.RankFailedError: "
    return [line.strip("\0").removeprefix(words) for line in text.splitlines() if words in line]


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def seconds_since_failure(stdout: str, ended: float) -> float:
    failed = re.search(r"failing at ([\d.]+)", stdout)
    assert failed is not None, stdout
    return ended - float(failed[1])


@pytest.mark.parametrize(
    ("fails", "name", "plans_ahead"),
    [
        ("draft", "draft rank 1 (cpu:0)", 1),
        ("target follower", "target rank 3 (cpu:2)", 0),
    ],
)
def test_an_exception_on_an_engine_rank_reaches_the_program_with_the_ranks_name_and_ends_the_job(
    run_ranks: RunRanks, models: dict[str, str], fails: str, name: str, plans_ahead: int
) -> None:
    size = 4 if fails == "target follower" else 3
    environment = {**models, "JOB_FAILS": fails, "JOB_PLANS_AHEAD": str(plans_ahead), "JOB_TARGET_RANKS": str(size - 2)}
    done = run_ranks(size, PROGRAM, env=environment, timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    assert named_failures(done.stderr) == [f"{name} failed: ValueError: request 7: the device is on fire"]
    assert "trtrun: " not in done.stderr.replace("trtrun.errors", "")  # no other rank says anything
    assert seconds_since_failure(done.stdout, done.ended) < SOON


@pytest.mark.parametrize(("fails", "rank"), [("draft", 1), ("target leader", 2)])
def test_a_program_may_catch_the_failure_of_a_rank_and_ends_non_zero_all_the_same(
    run_ranks: RunRanks, models: dict[str, str], fails: str, rank: int
) -> None:
    """It ends when it likes: the other ranks, which hang, wait for that. Closing does not hang."""
    environment = {**models, "JOB_FAILS": fails, "JOB_STYLE": "catch", "JOB_PLANS_AHEAD": "1"}
    done = run_ranks(3, "-m", "mpi4py", PROGRAM, env=environment, timeout=TIMEOUT, forked=True)
    assert done.returncode == 1
    caught = re.findall(r"caught: (.*)", done.stdout)
    assert len(caught) == 2 and caught[0] == caught[1], done.stdout
    assert re.fullmatch(rf"\w+ rank {rank} \(cpu:\d\) failed: ValueError: request 7: the device is on fire", caught[0])
    assert "the program is over, and its own last work is done" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fails", "style"),
    [("orchestrator", "with"), ("orchestrator", "bare"), ("program", "bare")],
)
def test_an_exception_at_the_orchestrator_reaches_the_program_and_ends_the_job(
    run_ranks: RunRanks, models: dict[str, str], fails: str, style: str
) -> None:
    """Whether or not the program closes the LLM on its way out; the exception is its own to see, once."""
    environment = {**models, "JOB_FAILS": fails, "JOB_STYLE": style, "JOB_PLANS_AHEAD": "1"}
    done = run_ranks(3, PROGRAM, env=environment, timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    assert done.stderr.splitlines().count("the device is on fire") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert seconds_since_failure(done.stdout, done.ended) < SOON


def test_a_program_that_never_closes_its_llm_ends_all_the_same(run_ranks: RunRanks, models: dict[str, str]) -> None:
    environment = {**models, "JOB_FAILS": "nothing", "JOB_STYLE": "forgotten"}
    done = run_ranks(3, PROGRAM, env=environment, timeout=TIMEOUT, forked=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killing_any_rank_ends_the_job(run_ranks: RunRanks, models: dict[str, str], rank: int) -> None:
    done = run_ranks(3, PROGRAM, env={**models, "JOB_FAILS": f"kill {rank}"}, timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    assert seconds_since_failure(done.stdout, done.ended) < SOON
    line = next(line for line in done.stdout.splitlines() if line.startswith("pids"))
    processes = [int(word) for word in line.split()[1:]]
    assert len(processes) == 3
    deadline = time.monotonic() + SOON
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"{left} outlived their job"
        time.sleep(0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_a_world_of_another_size_ends_at_once_and_says_the_counts(
    run_ranks: RunRanks, models: dict[str, str], size: int
) -> None:
    done = run_ranks(size, PROGRAM, env={**models, "JOB_FAILS": "nothing"}, timeout=TIMEOUT, forked=True)
    assert done.returncode != 0
    assert "PlacementError" in done.stderr
    assert "need 3 ranks (orchestrator rank 0 (host), draft rank 1 (cpu:0), target rank 2 (cpu:1))" in done.stderr
    assert f"but {size} were started" in done.stderr
