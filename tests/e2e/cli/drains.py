"""Helpers of the tests of drains: rows that take long, and the moments at which a signal is sent. No moment is a time:
each is something that can be seen from outside, such as a handler that is in place or a row in the working file."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked_commands import ranks_below

PATIENCE = 240.0
"""Seconds that anything may take on a busy machine before a test gives up on it."""


def wait_for_end_of(processes: Iterable[int]) -> None:
    """Wait until none of the processes is left: a user's own mpirun may end before the ranks that it has killed."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process)
            try:
                ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(handle)
            assert ready, f"process {process} is still there after {PATIENCE:g} s"


def wait_until(is_there: Callable[[], bool], process: subprocess.Popen[str], what: str, pause: float = 0.005) -> None:
    """Wait for an event of a process; fails the test when the process ends before it, or after PATIENCE.

    Args:
        is_there: asked every `pause` seconds.
        process: must live on until then.
        what: the event, for the message.
        pause: seconds; more where asking is work.
    """
    deadline = time.monotonic() + PATIENCE
    while not is_there():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        try:
            process.wait(timeout=pause)
        except subprocess.TimeoutExpired:
            continue
        errors = process.stderr.read() if process.stderr is not None else ""
        raise AssertionError(f"the process ended with {process.returncode} before {what}: {errors}")


def handles(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, as the kernel knows it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def rank_of(process: int, rank: int) -> int | None:
    """Process id of a rank below `process`, None while it is not there."""
    return ranks_below(process).get(rank)


def written_rows(working: Path) -> list[dict[str, Any]]:
    """Whole rows of a working file, in order of completion."""
    if not working.exists():
        return []
    return [json.loads(line) for line in working.read_bytes().split(b"\n")[:-1]]


def written_indexes(working: Path) -> set[int]:
    """Indexes of the rows in a working file; no row is there twice."""
    indexes = [row["index"] for row in written_rows(working)]
    assert len(indexes) == len(set(indexes)), f"a row was written twice: {indexes}"
    return set(indexes)
