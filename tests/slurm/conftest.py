"""What the Slurm tests share: the cluster, the command, a configuration of the shipped pair, its undisturbed rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch import Rows, Run, Start, command_environment, command_words, make_prompts, read_rows
from cluster import Cluster, missing
from forked_commands import shared_commands


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
    """Where a test's files lie and its jobs run; its name has what a shell and sbatch must not trip over."""
    place = tmp_path / "it's a $(folder) #1"
    place.mkdir()
    return place


@pytest.fixture
def trtrun(cluster: Cluster, folder: Path) -> Run:
    """Return run(*arguments): the command on the cluster's login node, which is this host, captured; it is forked."""

    def run(*arguments: object, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        return shared_commands().run(list(map(str, arguments)), command_environment(cluster), folder, timeout)

    return run


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
    """Return make(nodes, slurm={…}, **sections) -> a YAML file for the shipped pair, one CPU slot of the target a node.

    The file is JSON, which is YAML.
    """

    def make(nodes: int, slurm: dict[str, Any] | None = None, **sections: Any) -> Path:
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

    return make


@pytest.fixture
def prompts(folder: Path) -> Callable[..., Path]:
    """Return write(count, max_tokens) -> a prompts file."""

    def write(count: int, max_tokens: int) -> Path:
        file = folder / "prompts.jsonl"
        lines = [json.dumps(row) for row in make_prompts(count, max_tokens)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return write


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
            lines = [json.dumps(row) for row in make_prompts(count, max_tokens)]
            (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            words = ["run", "--config", "run.yaml", "--prompts", "prompts.jsonl", "--output", "out.jsonl"]
            done = shared_commands().run(words, command_environment(None), folder, 170)
            assert done.returncode == 0, done.stderr
            known[count, max_tokens, targets] = read_rows(folder / "out.jsonl")
        return known[count, max_tokens, targets]

    return make
