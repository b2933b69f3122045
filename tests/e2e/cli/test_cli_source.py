"""One configuration for all ranks, under a real mpirun: only rank 0 reads the file, each host takes its own models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import MPIRUN, ONE_PROCESS, THREE_RANKS, Configs, Run, forked_command_words, write_rows
from output_rows import read_rows

OTHER_HOST = "240.0.0.1"


@pytest.fixture
def per_rank(tmp_path: Path) -> list[str]:
    """Words of an mpirun of three ranks whose command line begins with its place: ranks other than 0 are on the host
    `beta` as Slurm would tell them, in a working directory of their own, and the file FILE is nowhere there."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    script = tmp_path / "rank.sh"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$OMPI_COMM_WORLD_RANK" = 0 ] || [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then\n'
        "    export SLURMD_NODENAME=alpha\n"
        "else\n"
        "    export SLURMD_NODENAME=beta\n"
        "fi\n"
        f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] && cd "{tmp_path}" || cd "{folder}"\n'
        'exec "$@"\n'
    )
    script.chmod(0o755)
    return [*MPIRUN, "-n", "3", str(script), *forked_command_words()]


def texts(done_rows: Path) -> list[list[int]]:
    return [row["token_ids"] for row in read_rows(done_rows)]


def broken_copy(model: Path, folder: Path) -> Path:
    """A copy of a model whose headers are right and whose weights cannot be used: loading it ends the job."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_only_rank_0_needs_the_file_and_each_host_takes_its_own_models(
    config: Configs, pair: Path, trtrun: Run, tmp_path: Path, per_rank: list[str]
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "def main(", "max_tokens": 8}])
    plain = trtrun("run", "--config", config(ONE_PROCESS), "--prompts", prompts, "--output", tmp_path / "plain.jsonl")
    assert plain.returncode == 0, plain.stderr
    # The draft is on alpha and the target on beta; what lies in the other host's place cannot be used.
    models = {
        "target": {"alpha": str(broken_copy(pair / "target", tmp_path / "target")), "beta": str(pair / "target")},
        "draft": {"alpha": str(pair / "draft"), "default": str(broken_copy(pair / "draft", tmp_path / "draft"))},
    }
    file = config(THREE_RANKS, **{name: {"model": paths} for name, paths in models.items()})
    shutil.copy(file, tmp_path / "only_here.yaml")
    run = ["run", "--config", "only_here.yaml", "--prompts", prompts, "--output", tmp_path / "rows.jsonl"]
    done = trtrun(*run, words=per_rank)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "rows.jsonl") == texts(tmp_path / "plain.jsonl")
    # The same with the directories exchanged: had a rank taken the other host's, this would be no different.
    exchanged = {name: dict(zip(paths, reversed(paths.values()), strict=True)) for name, paths in models.items()}
    file = config(THREE_RANKS, **{name: {"model": paths} for name, paths in exchanged.items()})
    shutil.copy(file, tmp_path / "only_here.yaml")
    done = trtrun(*run[:-1], tmp_path / "more.jsonl", words=per_rank)
    assert done.returncode != 0
    assert "holds NaN" in done.stderr


def test_a_model_that_one_host_lacks_is_told_with_that_ranks_number_and_host(
    config: Configs, pair: Path, trtrun: Run, per_rank: list[str]
) -> None:
    paths = {"alpha": str(pair / "target"), "beta": "/nowhere/target"}
    file = config(THREE_RANKS, target={"model": paths})
    done = trtrun("run", "--config", file, "--prompt", "x", words=per_rank)
    lines = [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]
    assert done.returncode != 0
    assert lines, done.stderr
    said = re.compile(
        rf"{re.escape(f'trtrun: {file}')}, on rank [23] of host \S+: target.model: no such directory: /nowhere"
    )
    assert all(said.match(line) for line in lines), lines


@pytest.mark.parametrize("starter", ["trtrun", "mpirun"])
def test_a_host_outside_the_slurm_job_is_refused_before_a_rank_starts(
    config: Configs, trtrun: Run, starter: str
) -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "alpha,beta"}
    devices = {"target": ["alpha/cpu:0", "gamma/cpu:0"], "draft": ["alpha/cpu:1"]}
    file = config(devices)
    words = [*MPIRUN, "-n", "3", *forked_command_words()] if starter == "mpirun" else None
    environment = job if starter == "trtrun" else {}
    if words is not None:
        for name, value in job.items():
            words[1:1] = ["-x", f"{name}={value}"]
    done = trtrun("run", "--config", file, "--prompt", "x", env=environment, words=words)
    lines = [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]
    assert done.returncode == 2
    assert len(lines) == 1, done.stderr
    assert f"{file}: target.devices: gamma is not in Slurm job 17 (known: alpha, beta)" in lines[0] or (
        f"{file}: target.devices: gamma is not in Slurm job 17 (did you mean" in lines[0]
    )


def test_all_ranks_have_the_configuration_that_rank_0_read(pair: Path, tmp_path: Path, run_ranks: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"target: {{model: {pair}/target, devices: [cpu:1, cpu:2]}}\n"
        f"draft: {{model: {pair}/draft, devices: [cpu:0]}}\n"
        "launch: {environment: {NAME: 'Z\u00fcrich \u4f60 \U0001f600', SCALE: 1e-7}, slurm: {time: 90}}\n"
    )
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from launch.jobs.placement.run_config import load_run_config\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "path = Path(sys.argv[1]) if rank == 0 else Path('/nowhere/run.yaml')\n"
        "text = load_run_config(path, ['threads=7']).model_dump_json()\n"
        "Path(sys.argv[2], f'{rank}.json').write_text(text)\n"
    )
    done = run_ranks(4, "-c", program, str(file), str(tmp_path))
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"{rank}.json").read_text() for rank in range(4)]
    values = json.loads(texts[0])
    assert texts == [texts[0]] * 4
    assert values["target"]["devices"] + values["draft"]["devices"] == ["cpu:1", "cpu:2", "cpu:0"]
    assert values["launch"]["environment"] == {"NAME": "Z\u00fcrich \u4f60 \U0001f600", "SCALE": "1e-7"}
    assert (values["threads"], values["launch"]["slurm"]["time"]) == (7, 90)
