"""Jobs whose ranks run in an image, on a real Slurm. Apptainer is a stand-in (programs/apptainer); srun, its PMI2 and
MPICH are real."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from batch import ROOT, Run
from mpi_libraries import find_mpi

pytestmark = pytest.mark.timeout(240)

NODES = {"model": "asset:target", "devices": {"nodes": 2, "cpus_per_node": 1}}
PROGRAMS = Path(__file__).parent / "programs"


def write_image(folder: Path, **variables: str) -> str:
    """What stands for an image: a file that says its variables, and a PATH with nothing but its Python."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    (programs / "python3").chmod(0o755)
    values = {"PATH": str(programs), "PYTHONPATH": str(ROOT), **variables}
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    (folder / "trtrun.sif").write_text(text, encoding="utf-8")
    return "trtrun.sif"


def test_srun_starts_the_ranks_of_mpich_in_an_image_on_two_nodes(
    trtrun: Run, config: Callable[..., Path], folder: Path
) -> None:
    image = write_image(folder, **find_mpi("mpich"))
    slurm = {
        "launcher": "srun", "container": {"image": image, "env": {"MARK": "it's $inside"}},
        "setup": [f"export PATH={shlex.quote(str(PROGRAMS))}:$PATH"],
    }  # fmt: skip
    file = config(1, slurm, target=NODES, launch={"mpi": "mpich"})
    done = trtrun("submit", "--config", file, "--follow", "--", "check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["ok"] and [rank["host"] for rank in report["ranks"]] == ["n1", "n1", "n1", "n2"]
    for rank in report["ranks"]:
        told = rank["surroundings"]
        assert (told["family"], told["started_by"]) == ("MPICH", "srun --mpi=pmi2")
        assert told["container"] == f"Apptainer ({folder / image})"
