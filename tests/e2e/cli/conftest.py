"""What the tests of the commands share: a small pair of models, and the command itself in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_runs import bench as bench
from checkpoints import make_checkpoint, make_draft
from commands import ROOT, Configs, Run, command_environment, command_words, faulty_environment
from forked_commands import ForkedCommands, ForkedProcess, forked_words, shared_commands
from forking_process import FAULT


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `draft`: random Llamas in float32 with long contexts and a tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", tokenizer=True, num_hidden_layers=3, max_position_embeddings=65536)
    make_draft(folder / "draft", folder / "target", num_layers=2)
    return folder


@pytest.fixture
def config(pair: Path, tmp_path: Path) -> Configs:
    """Return make(devices, **sections) -> path of a YAML file."""
    return Configs(pair, tmp_path)


@pytest.fixture(scope="session")
def forked_commands() -> ForkedCommands:
    """A process that has imported torch, for commands to be forked from."""
    return shared_commands()


@pytest.fixture
def trtrun(forked_commands: ForkedCommands) -> Run:
    """Return run(*arguments, env=…, timeout=…, words=…): the command, captured.

    It is a new program where it is given a PYTHONPATH, or words of another program than a file or module of Python;
    elsewhere it and its ranks are forked.
    """

    def run(
        *arguments: object,
        env: dict[str, str] | None = None,
        timeout: float = 120,
        words: list[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        texts = [str(argument) for argument in arguments]
        if (words is None or words[0] == sys.executable) and "PYTHONPATH" not in (env or {}):
            return forked_commands.run(texts, command_environment(env), ROOT, timeout, words)
        command = [*(words or command_words()), *texts]
        environment = command_environment(env)
        if FAULT in environment and forked_words()[-1] not in command:
            environment = faulty_environment(environment)
        for _ in range(2):
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                cwd=ROOT,
                check=False,
            )
            # Open MPI 5.0.11's mpirun itself dies at its very end, behind its own last words, once in thousands of runs
            # (tests/conftest.py). Of trtrun no signal is taken for that.
            died = Path(command[0]).name == "mpirun" and done.returncode in (-signal.SIGSEGV, -signal.SIGABRT)
            if not (died and "prterun has exited" in done.stderr):
                break
        return done

    return run


@pytest.fixture
def start_trtrun(forked_commands: ForkedCommands) -> Iterator[Callable[..., Any]]:
    """Return start(*arguments, words=…, forks_ranks=…): the command, running; what is left of it ends with the test.

    As of `trtrun`, it is a new program where it is given words. Ranks are forked, too, unless `forks_ranks` is false:
    for tests of what becomes of ranks whose mpirun dies, and of files that they have open.
    """
    started: list[subprocess.Popen[str] | ForkedProcess] = []

    def start(
        *arguments: object, words: list[str] | None = None, forks_ranks: bool = True
    ) -> subprocess.Popen[str] | ForkedProcess:
        texts, environment = list(map(str, arguments)), command_environment()
        if words is None:
            started.append(forked_commands.start(texts, environment, ROOT, ranks=forks_ranks))
        else:
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen([*words, *texts], stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # the kernel takes its ranks along
        process.communicate(timeout=60)
