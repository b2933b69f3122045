"""Runs of scripts/bench/bench_gpu.py with tiny models on CPU slots, and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Run, command_environment
from forked_commands import ForkedCommands

sys.path.append(str(ROOT))
from launch.jobs.placement.memory import JobMemory
from scripts.bench.gpu_bench.placements import PLACEMENTS
from trtrun.configuration.config import load_config
from trtrun.start.job_spec import JobSpec

FORKED_BENCH = Path(__file__).parent / "forked_bench.py"
GPUS = {count: ("--gpus", count, "--devices", "cpu", "--time-limit", 900) for count in PLACEMENTS}
"""Options by the number of devices."""


@pytest.fixture
def bench(forked_commands: ForkedCommands) -> Run:
    """Return run(*arguments, timeout=…): the script, captured; its commands are forked."""

    def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        descriptor = forked_commands.descriptor
        words = [sys.executable, FORKED_BENCH, descriptor, *arguments]
        return subprocess.run(
            [str(word) for word in words], pass_fds=[descriptor], env=command_environment(), cwd=ROOT,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line."""
    return dict(json.loads(done.stdout.splitlines()[-1]))


def states_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """How each part ended."""
    return {part["part"]: part["state"] for part in summary_of(done)["parts"]}


def rows_of(text: str, title: str) -> list[dict[str, str]]:
    """The Markdown table under a title, a mapping a row."""
    lines = text[text.index(f"**{title}") :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def count_ranks(config: Path, sets: Sequence[str] = ()) -> int:
    """Of the ranks of a job that hold models, all of which can be cut so."""
    memory = JobMemory.read(JobSpec(load_config(config, sets)))
    held = [memory.shard_bytes(slot.rank) for slot in memory.topology.slots]
    assert all(drafts > 0 and verifies > 0 for drafts, verifies in held)
    return len(held)
