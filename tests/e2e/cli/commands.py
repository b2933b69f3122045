"""Helpers of the command tests: the command's words and environment, its rows and errors, its processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_commands import forked_words, running_processes
from forking_process import FAULT, FAULTS
from mpi_libraries import NO_NETWORKS

ROOT = Path(__file__).resolve().parents[3]
ONE_PROCESS = {"target": ["cpu:0"], "draft": ["cpu:0"]}
FOUR_RANKS = {"target": ["cpu:1", "cpu:2"], "draft": ["cpu:0"]}
THREE_RANKS = {"target": ["cpu:1"], "draft": ["cpu:0"]}
"""For what is the same for every number of ranks: each takes seconds of a core to start."""
ONE_SLOT = ("--set", 'target.devices=["cpu:0"]')
TWO_SLOTS = ("--set", 'target.devices=["cpu:1"]')
"""Make one process, or three ranks, of the shipped pair's four."""
FIXED = ("--set", "speculation.pacing=fixed", "--set", "speculation.ahead=off")
"""For runs of the shipped pair whose rows are compared: how much is drafted does not follow from times."""

Run = Callable[..., subprocess.CompletedProcess[str]]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPIRUN += NO_NETWORKS


def command_words() -> list[str]:
    """The installed console script, or the module it calls."""
    script = Path(sys.executable).parent / "trtrun"
    return [str(script)] if script.exists() else [sys.executable, "-m", "launch.cli"]


def forked_command_words() -> list[str]:
    """The same, forked: for ranks that a user's own mpirun starts. Tests of how those begin start the real program."""
    return [*forked_words(), sys.executable, "-m", "launch.cli"]


def command_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment with one thread a rank, and this checkout's code."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **(extra or {})}


def environment_with(command: list[str], folder: Path) -> dict[str, str]:
    """As of other commands, with `trtrun` on PATH, which is what `command` starts."""
    script = folder / "trtrun"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return command_environment({"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})


def with_fault(fault: str) -> dict[str, str]:
    """Environment in which one rank misbehaves: as `trtrun` has it of tests that fork ranks, which see to the rest."""
    return {FAULT: fault}


def faulty_environment(environment: dict[str, str]) -> dict[str, str]:
    """The same for new programs: Python finds the fault by itself."""
    return environment | {"PYTHONPATH": os.pathsep.join([str(FAULTS), environment["PYTHONPATH"]])}


@dataclass(frozen=True)
class Configs:
    """Makes YAML files for the pair."""

    pair: Path
    folder: Path

    def __call__(self, devices: dict[str, list[str]], **sections: Any) -> Path:
        """Write a configuration with these devices and return its path; JSON is YAML."""
        values: dict[str, Any] = {
            name: {"model": str(self.pair / name), "devices": slots} for name, slots in devices.items()
        } | {"speculation": {"pacing": "fixed"}}  # runs that are compared draft alike
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        file = self.folder / f"run{len(list(self.folder.glob('*.yaml')))}.yaml"
        file.write_text(json.dumps(values), encoding="utf-8")
        return file


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write a JSON lines file; a text stands as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed command says; fails the test when it says more, or says it twice."""
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("trtrun: ")
    return lines[0]


def parent_of(process: int) -> int:
    """Process id of the one that has started a process; of a forked rank, mpirun's, as of any other."""
    standing = {rank: other for other, rank in running_processes()[1].items()}
    return int(Path(f"/proc/{standing.get(process, process)}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
