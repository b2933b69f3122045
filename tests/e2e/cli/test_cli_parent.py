"""The process that the user types, where ranks of their own do the work: it only checks and watches, and so does
without what takes long to import. mpirun is a program here that starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, THREE_RANKS, Configs, command_environment

HEAVY = ("llvmlite", "mpi4py.MPI", "torch", "transformers", "triton")

PROGRAM = f"""
import sys
from launch.cli import main
sys.argv = ["trtrun", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *sorted({{*{HEAVY!r}}} & set(sys.modules)), file=sys.stderr)
"""

MPIRUN = """#!/bin/sh
[ "$1" = --version ] && exec echo "mpirun (Open MPI) 5.0.8"
echo "$@" > "$0.started"
exit 3
"""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--prompt", "x"],
        ["bench", "--rows", "1"],
        ["check"],
        ["serve", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"],
        ["serve-engine", "--socket", "nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_the_parent_of_mpirun_does_without_torch(words: list[str], config: Configs, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(MPIRUN, encoding="utf-8")
    mpirun.chmod(0o755)
    models = {
        "target": {"quantization": "fp8", "dtype": "bfloat16"},
        "draft": {"quantization": "int8", "dtype": "bfloat16"},
    }
    file = config(THREE_RANKS, launch={"mpi": "openmpi", "mpirun": str(mpirun)}, **models)
    command, *options = words
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, "--config", str(file), *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=command_environment(),
        cwd=ROOT,
        check=False,
    )
    assert "-n 3 " in (tmp_path / "mpirun.started").read_text(encoding="utf-8"), done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:"
