"""The templates under launch/configs through the real command: the CPU ones run, the others say what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT, Run, error_line

TEMPLATES = ROOT / "launch" / "configs"
LARGE = sorted(path for path in TEMPLATES.glob("*.yaml") if "/models/" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["one_process_cpu", "cpu_pair", "cpu_pair_on_two_cores"])
def test_the_cpu_templates_run(trtrun: Run, name: str) -> None:
    arguments = ["--prompt", "def main(", "--max-tokens", "4", "--set", "kv_cache.max_tokens=512"]
    done = trtrun("run", "--config", TEMPLATES / f"{name}.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    assert "1 prompt, 4 tokens" in done.stderr


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
@pytest.mark.parametrize("command", [["plan"], ["run", "--prompt", "x"]], ids=["plan", "run"])
def test_a_template_whose_models_are_not_there_says_so(trtrun: Run, path: Path, command: list[str]) -> None:
    done = trtrun(*command, "--config", path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    line = error_line(done)
    if command[0] == "run" and path.stem == "two_nodes_slurm":  # there is no allocation to fill the counts from
        assert line.startswith(f"trtrun: {path}: target.devices: 4 GPUs a node are asked for, but this host, outside a")
    else:
        missing = "target.model: no such directory: /models/Llama-3.1-70B-Instruct"
        assert line == f"trtrun: {path}: {missing}"


def test_there_are_templates_for_models_that_do_not_ship() -> None:
    assert len(LARGE) == 4
