"""What the Slurm tests share: the cluster, the command, a configuration of the shipped pair, its undisturbed rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch import (
    Rows,
    Run,
    Start,
    command_environment,
    command_words,
    make_folder,
    read_rows,
    run_command,
    write_config,
    write_prompts,
)
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of two nodes; skips where none can be started."""
    reason = missing()
    if reason is not None:
        pytest.skip(f"needs Slurm: {reason}")
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's files lie and its jobs run."""
    return make_folder(tmp_path)


@pytest.fixture
def trtrun(cluster: Cluster, folder: Path) -> Run:
    """Return run(*arguments): as `run_command`."""
    return lambda *arguments, **options: run_command(cluster, folder, arguments, **options)


@pytest.fixture
def start_trtrun(cluster: Cluster, folder: Path) -> Iterator[Start]:
    """Return start(*arguments): the command, running; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command_words(), *(str(argument) for argument in arguments)],
            env=command_environment(cluster), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def config(folder: Path) -> Callable[..., Path]:
    """Return make(nodes, slurm={…}, **sections): as `write_config`."""
    return lambda *arguments, **sections: write_config(folder, *arguments, **sections)


@pytest.fixture
def prompts(folder: Path) -> Callable[..., Path]:
    """Return write(count, max_tokens): as `write_prompts`."""
    return lambda *arguments: write_prompts(folder, *arguments)


@pytest.fixture(scope="session")
def local_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rows]:
    """Return rows(count, max_tokens, targets=1): the output of a run on this host that nobody disturbs.

    Sums over tensor-parallel ranks round in their own way, so the number of targets is part of what is compared.
    """
    known: dict[tuple[int, int, int], Rows] = {}

    def make(count: int, max_tokens: int, targets: int = 1) -> Rows:
        if (count, max_tokens, targets) not in known:
            folder = tmp_path_factory.mktemp("local")
            values = {
                "target": {"model": "asset:target", "devices": [f"cpu:{index}" for index in range(targets)]},
                "draft": {"model": "asset:draft", "devices": ["cpu:0"]},
                "speculation": {"pacing": "fixed"},
            }
            (folder / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
            write_prompts(folder, count, max_tokens)
            words = ["run", "--config", "run.yaml", "--prompts", "prompts.jsonl", "--output", "out.jsonl"]
            done = run_command(None, folder, words, 170)
            assert done.returncode == 0, done.stderr
            known[count, max_tokens, targets] = read_rows(folder / "out.jsonl")
        return known[count, max_tokens, targets]

    return make
