"""An exception on any rank ends the whole job: non-zero, soon, with one line that names the rank."""

from __future__ import annotations

import re

import pytest

NAMES = ["orchestrator rank 0 (host)", "draft rank 1 (cpu:0)", "target rank 2 (cpu:1)", "target rank 3 (cpu:2)"]


@pytest.mark.parametrize("rank", [0, 3])
def test_an_exception_on_one_rank_ends_the_job_with_one_line(run_ranks, rank: int) -> None:
    done = run_ranks(4, "tests/ranks/programs/abort_case.py", env={"FAILING_RANK": str(rank)}, forked=True)
    assert done.returncode != 0
    # mpirun ends its own message with a NUL byte, which may come to stand before the line.
    lines = [line.strip("\0") for line in done.stderr.splitlines() if "trtrun: " in line]
    assert lines == [f"trtrun: {NAMES[rank]} failed: ValueError: request 7: no such token"]
    failed_at = re.search(r"failing at ([\d.]+)", done.stdout)
    assert failed_at is not None
    # It takes well under a second; the bound only tells an abort from a job that somebody else has to end.
    seconds = done.ended - float(failed_at[1])
    print(f"the job ended {seconds:.2f} s after the exception")
    assert seconds < 10
