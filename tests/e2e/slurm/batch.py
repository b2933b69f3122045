"""Helpers of the Slurm tests: the command and its environment, prompts, rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import output_rows
from cluster import Cluster
from forked_commands import shared_commands
from output_rows import without_drafting

ROOT = Path(__file__).resolve().parents[3]
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


def run_command(
    cluster: Cluster | None, folder: Path, arguments: Sequence[object], timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """The command on a cluster's login node, which is this host, captured; it is forked."""
    return shared_commands().run(list(map(str, arguments)), command_environment(cluster), folder, timeout)


def write_config(folder: Path, nodes: int, slurm: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A YAML file for the shipped pair, one CPU slot of the target a node. It is JSON, which is YAML."""
    values: dict[str, Any] = {
        "target": {"model": "asset:target", "devices": {"nodes": nodes, "cpus_per_node": 1}},
        "draft": {"model": "asset:draft", "devices": {"nodes": 1, "cpus_per_node": 1}},
        "threads": 1,
        "speculation": {"pacing": "fixed"},  # runs that are compared draft alike
        **sections,
    }
    # A limit, because a job that hangs must not outlive the tests.
    values["launch"] = {**values.get("launch", {}), "slurm": {"time": "10:00", **(slurm or {})}}
    file = folder / f"run {len(list(folder.glob('*.yaml')))}.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def write_prompts(folder: Path, count: int, max_tokens: int) -> Path:
    """A prompts file of `make_prompts`."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in make_prompts(count, max_tokens)), encoding="utf-8")
    return file


def make_folder(place: Path) -> Path:
    """Where a test's files lie and its jobs run; its name has what a shell and sbatch must not trip over."""
    folder = place / "it's a $(folder) #1"
    folder.mkdir()
    return folder


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
