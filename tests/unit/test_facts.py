"""What ranks must have alike, and what each must have: told for every rank, by the functions that a check uses."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpi4py
import pytest
from checkpoints import make_checkpoint, make_draft

from launch.check.inventory import Facts, collect_facts, find_problems
from parallel.topology import Topology
from trtrun.config import RuntimeConfig, make_config

HOST = socket.gethostname()
# The library tells its version without being started; in a job it has been, before facts are collected.
mpi4py.rc.initialize = False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", tokenizer=True, max_position_embeddings=65536)
    make_draft(folder / "draft", folder / "target", num_layers=1)
    return folder


def config_of(pair: Path, **sections: Any) -> RuntimeConfig:
    values = {
        "target": {"model": str(pair / "target"), "devices": ["cpu:1", "cpu:2"]},
        "draft": {"model": str(pair / "draft"), "devices": ["cpu:0"]},
        **sections,
    }
    return make_config(values)


def topology_of(config: RuntimeConfig) -> Topology:
    return Topology.from_devices(config.draft_devices, config.target.devices, config.launch.orchestrator_host)


def collect_all(config: RuntimeConfig) -> tuple[list[Facts], Topology]:
    """The facts of every rank, as if all were this process; they go through JSON as in a job."""
    topology = topology_of(config)
    facts = [collect_facts(config, topology, rank) for rank in range(topology.world_size)]
    return [Facts.from_dict(json.loads(json.dumps(rank.to_dict()))) for rank in facts], topology


def test_a_good_job_has_no_problems(pair: Path) -> None:
    facts, topology = collect_all(config_of(pair))
    assert find_problems(facts, topology) == []
    assert [rank.host for rank in facts] == [HOST] * 4
    assert list(facts[0].versions) == ["trtrun", "Python", "torch", "mpi4py", "MPI library"]
    assert facts[0].free_bytes is None
    assert all(rank.free_bytes and rank.kv_tokens for rank in facts[1:])
    assert facts[2].shard_bytes == facts[3].shard_bytes > 0 < facts[1].shard_bytes
    assert set(facts[0].configs) == {"draft", "target"}


@pytest.mark.parametrize(("name", "other"), [("torch", "2.0.0"), ("trtrun", "0.1.0 (00000000)"), ("MPI library", "x")])
def test_other_versions_are_told_with_ranks_and_hosts(pair: Path, name: str, other: str) -> None:
    facts, topology = collect_all(config_of(pair))
    for rank in (1, 3):
        facts[rank] = replace(facts[rank], host="b", versions={**facts[rank].versions, name: other})
    (problem,) = (line for line in find_problems(facts, topology) if "same everywhere" in line)
    own = facts[0].versions[name]
    assert problem == (
        f"{name} is not the same everywhere: {own} on rank 0, 2 ({HOST}); {other} on rank 1, 3 (b): "
        "install one version on all hosts"
    )


def test_nccl_is_compared_among_those_that_have_it(pair: Path) -> None:
    facts, topology = collect_all(config_of(pair))
    for rank in (2, 3):
        facts[rank] = replace(facts[rank], versions={**facts[rank].versions, "NCCL": "2.28.3"})
    assert find_problems(facts, topology) == []
    facts[3] = replace(facts[3], versions={**facts[3].versions, "NCCL": "2.27.1"})
    (problem,) = find_problems(facts, topology)
    assert problem.startswith("NCCL is not the same everywhere: 2.28.3 on rank 2 ")


def test_missing_models_are_told_for_every_rank(pair: Path, tmp_path: Path) -> None:
    config = config_of(pair)
    empty = tmp_path / "empty"
    empty.mkdir()
    elsewhere = config.model_copy(update={"target": config.target.model_copy(update={"model": empty})})
    gone = config.model_copy(update={"draft": config.draft.model_copy(update={"model": tmp_path / "gone"})})  # type: ignore[union-attr]
    facts, topology = collect_all(config)
    facts[2], facts[3] = (collect_facts(elsewhere, topology, rank) for rank in (2, 3))
    facts[1] = collect_facts(gone, topology, 1)
    assert find_problems(facts, topology) == [
        f"draft rank 1 (cpu:0) on {HOST}: draft: {tmp_path}/gone does not exist; give a Hugging Face model directory "
        "(config.json and *.safetensors)",
        f"target rank 2 (cpu:1) on {HOST}: target: {empty} has no config.json; give a Hugging Face model directory",
        f"target rank 3 (cpu:2) on {HOST}: target: {empty} has no config.json; give a Hugging Face model directory",
    ]


def test_weights_matter_only_where_they_are_held(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((pair / "target" / "config.json").read_bytes())
    config = config_of(pair)
    bare = config.model_copy(update={"target": config.target.model_copy(update={"model": tmp_path})})
    facts, topology = collect_all(bare)
    assert [bool(rank.problems) for rank in facts] == [False, False, True, True]
    assert "has no weights" in facts[2].problems[0]
    assert len(find_problems(facts, topology)) == 2


def test_different_models_under_one_path_are_told(pair: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "target", tokenizer=True, max_position_embeddings=65535)
    config = config_of(pair)
    other = config.model_copy(update={"target": config.target.model_copy(update={"model": tmp_path / "target"})})
    facts, topology = collect_all(config)
    facts[3] = collect_facts(other, topology, 3)
    (problem,) = find_problems(facts, topology)
    assert problem.startswith("target: config.json is not the same everywhere: ")
    assert f"{facts[3].configs['target']} on rank 3 ({HOST})" in problem
    assert "on rank 0–2" in problem


def test_too_small_a_device_is_told_with_the_numbers(pair: Path) -> None:
    scheduler = {"max_batch_size": 1024, "max_num_tokens": 5120}
    facts, topology = collect_all(config_of(pair, kv_cache={"max_tokens": 10**9}, scheduler=scheduler))
    problems = find_problems(facts, topology)
    assert len(problems) == 3
    assert problems[1].startswith(f"target rank 2 (cpu:1) on {HOST}: kv_cache.max_tokens 1000000000 ")
    assert "tokens fit" in problems[1]


def test_a_gpu_that_is_not_there_is_told(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(pair)
    values = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "draft")}
    values["target"]["devices"], values["draft"]["devices"] = ["cuda:97"], ["cuda:96"]
    facts, topology = collect_all(make_config(values))
    assert [problem.partition(",")[0] for problem in find_problems(facts, topology)] == [
        f"draft rank 1 (cuda:96) on {HOST}: cuda:96 is not on this host",
        f"target rank 2 (cuda:97) on {HOST}: cuda:97 is not on this host",
    ]


def test_ranks_on_other_hosts_than_planned_are_told(pair: Path) -> None:
    config = config_of(pair)
    sections = {"target": {"model": str(pair / "target"), "devices": {"nowhere.invalid": ["cpu:0"], HOST: ["cpu:1"]}},
                "launch": {"orchestrator_host": HOST}}  # fmt: skip
    config = config_of(pair, **sections, draft={"model": str(pair / "draft"), "devices": {HOST: ["cpu:0"]}})
    facts, topology = collect_all(config)
    assert find_problems(facts, topology) == [
        f"target rank 2 (nowhere.invalid cpu:0) runs on {HOST}, but its device is on nowhere.invalid: "
        "start the ranks on the hosts that `trtrun plan` shows, in that order"
    ]


def test_ranks_on_several_hosts_need_devices_that_name_them(pair: Path) -> None:
    facts, topology = collect_all(config_of(pair))
    facts[3] = replace(facts[3], host="b")
    (problem,) = find_problems(facts, topology)
    assert problem.startswith(f"the ranks are on 2 hosts ({HOST}: rank 0–2; b: rank 3), but the devices name none")
