"""Ranks of tests that are forked: what stands for one ends as it does, and takes it along."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import forked_ranks
import pytest
from commands import command_environment
from forked_commands import ForkedCommands

PROGRAM = """
import json, os, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print(json.dumps({"process": os.getpid(), "folder": os.getcwd(), "value": os.environ["VALUE"], "words": sys.argv[1:],
                  "has_torch": "torch" in sys.modules}), flush=True)
print("said", file=sys.stderr, flush=True)
exec(sys.stdin.read())
"""


@pytest.fixture
def words(tmp_path: Path, forked_commands: ForkedCommands) -> list[str]:
    """What mpirun starts for a rank that says what it is, and does what its standard input says."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", str(program)]
    standing = forked_ranks.standing_for(forked_commands.address, command)
    assert standing[:3] == command[:3] and standing[-4:] == command[-4:]
    return [*standing[3:-3], str(program), "a word"]


def start(words: list[str], folder: Path, **environment: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """A rank, and what it says of itself."""
    pipe = subprocess.PIPE
    values = command_environment({"VALUE": "its own", **environment})
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=values)
    assert process.stdout is not None
    told: dict[str, object] = json.loads(process.stdout.readline())
    return process, told


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("sys.exit(7)", 7),
        ("", 0),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("1 / 0", 1),
    ],
)
def test_who_stands_for_a_rank_ends_as_it_does(words: list[str], tmp_path: Path, work: str, status: int) -> None:
    process, told = start(words, tmp_path)
    assert told["has_torch"] and told["process"] != process.pid
    assert (told["folder"], told["value"], told["words"]) == (str(tmp_path), "its own", ["a word"])
    _, errors = process.communicate(work, timeout=60)
    assert process.returncode == status
    assert errors.startswith("said\n")


def test_signals_go_on_to_the_rank(words: list[str], tmp_path: Path) -> None:
    process, _ = start(words, tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 5
    process.communicate()


def test_a_rank_is_killed_with_who_stands_for_it(words: list[str], tmp_path: Path) -> None:
    process, told = start(words, tmp_path)
    rank = os.pidfd_open(int(str(told["process"])))
    process.kill()
    ended, _, _ = select.select([rank], [], [], 60)
    os.close(rank)
    assert ended
    process.communicate()


@pytest.mark.parametrize(
    ("name", "value"), [("PYTHONPATH", "/nowhere"), ("OMP_NUM_THREADS", "2"), (forked_ranks.INHERITED, "3")]
)
def test_a_rank_that_would_not_be_the_same_is_a_new_program(
    words: list[str], tmp_path: Path, name: str, value: str
) -> None:
    process, told = start(words, tmp_path, **{name: value})
    assert not told["has_torch"] and told["process"] == process.pid
    process.communicate("sys.exit(3)", timeout=60)
    assert process.returncode == 3
