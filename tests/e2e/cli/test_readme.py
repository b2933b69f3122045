"""The README's snippets as they stand, on the shipped pair: files written, commands typed into a shell, programs run.

Three are not what a reader does. Ports of the server are free ones, as others may run here. `trtrun submit` shows its
script (the README's own --dry-run), as there need be no Slurm. scripts/demo.sh and scripts/test.sh install, and the
second runs all of these tests: here they are looked at alone; test_cli_bench.py runs the demo behind the first.

The first `trtrun run`, the server and the program of Python are new programs, and so are their ranks. The shell finds
another `trtrun` for the other commands: it is forked from a process that has imported torch
(helpers/forked_commands.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import ROOT, environment_with, forked_command_words

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(kind, text) for kind, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
SCRIPTS = [line for line in LINES if line.startswith("scripts/")]
SERVE = [line for line in LINES if line.startswith("trtrun serve")]
COMMANDS = [line for line in LINES if line.startswith("trtrun ") and line not in SERVE]
RUN = next(line for line in COMMANDS if line.startswith("trtrun run"))
CURLS = [line for line in LINES if line.startswith("curl ")]
PREPARATIONS = [line for line in LINES if line.startswith("echo ")]
PATIENCE = 150.0
"""Seconds that anything may take on a busy machine before a test gives up on it."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where `trtrun` is a new program, of this checkout."""
    return environment_with([sys.executable, "-m", "launch.cli"], tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def forking_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where it is forked."""
    return environment_with(forked_command_words(), tmp_path_factory.mktemp("forking"))


@pytest.fixture
def folder(tmp_path: Path, environment: dict[str, str]) -> Path:
    """A new folder with the README's files."""
    for text in (text for kind, text in BLOCKS if kind == "yaml"):
        name = re.match(r"# (\w+\.yaml)\b", text)
        assert name is not None, "a YAML file begins with its name"
        (tmp_path / name[1]).write_text(text, encoding="utf-8")
    for line in PREPARATIONS:
        type_into_shell(line, tmp_path, environment)
    return tmp_path


def type_into_shell(line: str, folder: Path, environment: dict[str, str]) -> str:
    """What a line prints; fails the test where it fails."""
    words = ["bash", "-c", line]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_snippet_is_of_a_kind_that_is_tried_here() -> None:
    assert {kind for kind, _ in BLOCKS} == {"text", "sh", "yaml", "python"}
    assert sorted(LINES) == sorted(SCRIPTS + SERVE + COMMANDS + CURLS + PREPARATIONS)
    assert len(SCRIPTS) == 2 and len(SERVE) == len(CURLS) == 1


@pytest.mark.parametrize("line", SCRIPTS)
def test_the_scripts_can_be_run(line: str) -> None:
    (name,) = shlex.split(line, comments=True)
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", name], cwd=ROOT, check=True, timeout=PATIENCE)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[1])
def test_commands(line: str, folder: Path, environment: dict[str, str], forking_environment: dict[str, str]) -> None:
    words = shlex.split(line, comments=True)
    environment = environment if line == RUN else forking_environment
    assert words[1] != "submit" or "--dry-run" in words, "what would need a Slurm shows its script"
    assert type_into_shell(line, folder, environment).strip() or "--output" in words
    if words[1] == "run" and "--output" in words:
        (row,) = map(json.loads, (folder / "out.jsonl").read_text(encoding="utf-8").splitlines())
        assert row["error"] is None and len(row["token_ids"]) == 32


def test_the_server_answers_the_call(folder: Path, environment: dict[str, str]) -> None:
    line = re.sub(r"--http-port \d+", "--http-port 0 --grpc-port 0 --metrics-port 0", SERVE[0])
    words = ["bash", "-c", f"exec {line}"]
    server = subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    giving_up = threading.Timer(PATIENCE, server.kill)
    giving_up.start()
    try:
        assert server.stderr is not None
        said = next((line for line in server.stderr if "is served at" in line), "")
        url = re.search(r"is served at (http://[\d.:]+)", said)
        assert url is not None
        answer = type_into_shell(re.sub(r"http://[\d.:]+", url[1], CURLS[0]), folder, environment)
        assert answer.startswith("data: {") and answer.rstrip().endswith("data: [DONE]")
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=PATIENCE) == 0
    finally:
        giving_up.cancel()
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.parametrize("program", [text for kind, text in BLOCKS if kind == "python"], ids=["LLM"])
def test_programs(program: str, folder: Path, environment: dict[str, str]) -> None:
    (folder / "program.py").write_text(program, encoding="utf-8")
    assert type_into_shell(f"{shlex.quote(sys.executable)} program.py", folder, environment).strip()
