"""Helpers of the Slurm tests: the command and its environment, prompts, rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import output_rows
from cluster import Cluster
from output_rows import without_drafting

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]
Rows = list[dict[str, Any]]

TEXTS = ("def main(", "import os\n", "class Tree:", "for i in range(")

ONE_PROCESS = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
"""Sections for the tests that are about jobs, not about ranks: no mpirun, and soon up."""


def make_prompts(count: int, max_tokens: int) -> Rows:
    """Input rows of equal length."""
    return [
        {"prompt": TEXTS[place % 4] * (1 + place // 4), "max_tokens": max_tokens, "ignore_eos": True}
        for place in range(count)
    ]


def read_rows(path: Path) -> Rows:
    """Output rows without what differs from run to run."""
    return without_drafting(output_rows.read_rows(path))


def count_lines(path: Path) -> int:
    """Whole lines of a file that may not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def command_words() -> list[str]:
    """The command, as this Python has it."""
    return [sys.executable, "-m", "launch.cli"]


def command_environment(cluster: Cluster | None) -> dict[str, str]:
    """Of the command and its jobs: this checkout's code, one thread a rank."""
    base = os.environ if cluster is None else cluster.environment
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**base, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
