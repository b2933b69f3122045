"""examples/: each is run as it stands, on the shipped pair; the job of two nodes shows its script, as there need be no
Slurm, training takes two steps, and the chart is read without Helm. tests/e2e/serve has the example with a server, and
the router."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import ROOT, command_environment, environment_with, forked_command_words
from forked_commands import ForkedCommands
from output_rows import read_rows, without_drafting

from launch.cli import cli
from trtrun.configuration.config import make_config

EXAMPLES = ROOT / "examples"
TRIED = {"offline_batch.sh", "two_nodes.sh", "train_drafter.sh", "python_api.py"}
ELSEWHERE = {"openai_client.py"}
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return start(name, *words) -> what a script writes to stdout; `trtrun` is forked for it."""
    environment = environment_with(forked_command_words(), tmp_path)

    def run(name: str, *words: object) -> str:
        command = [str(EXAMPLES / name), *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_example_is_tried_and_listed() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == TRIED | ELSEWHERE
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in TRIED | ELSEWHERE if f"[{name}]({name})" not in page]


def test_an_offline_batch_in_one_go_and_in_parts(start: Start, tmp_path: Path) -> None:
    start("offline_batch.sh", tmp_path)
    rows, merged = read_rows(tmp_path / "rows.jsonl"), read_rows(tmp_path / "merged.jsonl")
    assert len(rows) == 6 and not [row for row in rows if row["error"] is not None]
    assert without_drafting(merged) == without_drafting(rows)


def test_the_job_of_two_nodes(start: Start, tmp_path: Path) -> None:
    script = start("two_nodes.sh", tmp_path, "--dry-run", "--partition", "some")
    for line in ("--nodes=2", "--partition=some", "--job-name=two-nodes", "--time=1:00:00", "--gres=gpu:4"):
        assert f"#SBATCH {line}\n" in script
    assert f"--output {tmp_path}/rows.jsonl" in script


def test_a_drafter_is_trained_and_drafts(start: Start, tmp_path: Path) -> None:
    said = start("train_drafter.sh", tmp_path, "--steps", 2, "--evaluation-steps", 2, "--heldout-rows", 1)
    result = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert result["method"] == "medusa" and result["steps"] == 2 and (tmp_path / "heads").is_dir()
    assert said.splitlines()[-1].strip()


def test_the_python_api(forked_commands: ForkedCommands, tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "python_api.py")]
    done = forked_commands.run([], command_environment(), tmp_path, 120, words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens a round: ") == 4


def test_the_chart_names_what_there_is() -> None:
    values = yaml.safe_load((EXAMPLES / "helm" / "values.yaml").read_text(encoding="utf-8"))
    template = (EXAMPLES / "helm" / "templates" / "server.yaml").read_text(encoding="utf-8")
    for path in re.findall(r"\.Values\.([\w.]+)", template):
        found = values
        for key in path.split("."):
            assert key in found or found == {}, path  # `resources` is the user's
            found = found.get(key, {})
    assert set(values) <= set(re.findall(r"\.Values\.(\w+)", template))
    whole = re.sub(r"^ *{{-[^}]*}}\n", "", template, flags=re.MULTILINE)
    parts = list(yaml.safe_load_all(re.sub(r"{{[^}]*}}", "any", whole)))
    assert [part["kind"] for part in parts] == ["ConfigMap", "Deployment", "Service", "ServiceMonitor"]
    (container,) = parts[1]["spec"]["template"]["spec"]["containers"]
    program, command, *words = [*container["command"], *container["args"]]
    assert program == "trtrun"
    options = {option for parameter in cli.get_command(None, command).params for option in parameter.opts}  # type: ignore
    assert {word for word in words if word.startswith("--")} <= options
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for role in ("target", "draft"):
        assert values["config"][role]["model"].startswith(values["models"]["path"])
        values["config"][role] |= {"model": f"asset:{role}", "devices": ["cpu:0"]}
    config = make_config(values["config"], where="values.yaml")
    assert ports == {
        "http": config.server.http_port, "grpc": config.server.grpc_port, "metrics": config.server.metrics_port
    }  # fmt: skip
    assert {port["targetPort"] for port in parts[2]["spec"]["ports"]} == set(ports)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in parts[1]["spec"]["template"]["spec"]["volumes"]}
    assert values["drainSeconds"] > config.server.request_timeout_s
