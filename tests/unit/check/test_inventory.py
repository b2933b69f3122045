"""What ranks must have alike, and what each must have: told for every rank, by the functions that a check uses."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpi4py
import pytest
from checkpoints import make_checkpoint, make_draft
from engines import build_engine
from hub_caches import COMMIT, OTHER_COMMIT, fill_cache
from huggingface_hub import constants

from launch.jobs.check.inventory import RankInventory, find_misfits, take_inventory
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.start.job_spec import JobSpec

HOST = socket.gethostname()
# The library tells its version without being started; in a job it has been, before ranks are collected.
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


def collect_all(config: RuntimeConfig) -> tuple[list[RankInventory], Topology]:
    """The ranks of every rank, as if all were this process; they go through JSON as in a job."""
    topology = topology_of(config)
    ranks = [take_inventory(JobSpec(config), rank) for rank in range(topology.world_size)]
    return [RankInventory.from_dict(json.loads(json.dumps(rank.to_dict()))) for rank in ranks], topology


def test_a_good_job_has_no_problems(pair: Path) -> None:
    ranks, topology = collect_all(config_of(pair))
    assert find_misfits(ranks, topology) == []
    assert [rank.host for rank in ranks] == [HOST] * 4
    assert list(ranks[0].versions) == ["trtrun", "Python", "torch", "mpi4py", "MPI library"]
    assert ranks[0].free_bytes is None
    assert all(rank.free_bytes and rank.kv_tokens for rank in ranks[1:])
    assert ranks[2].shard_bytes == ranks[3].shard_bytes > 0 < ranks[1].shard_bytes
    assert set(ranks[0].configs) == {"draft", "target"}


def test_an_engine_that_stands_by_does_not_ask_for_memory(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launch.jobs.check.inventory.free_bytes_of_slot", lambda device, slots: 1
    )  # the one that serves has it
    config = config_of(pair)
    assert "the weights need" in take_inventory(JobSpec(config), 1).problems[0]
    standing = take_inventory(JobSpec(config), 1, looks_at_device=False)
    assert standing.problems == () and standing.free_bytes is None
    assert standing.versions and standing.configs


@pytest.mark.parametrize(("name", "other"), [("torch", "2.0.0"), ("trtrun", "0.1.0 (00000000)"), ("MPI library", "x")])
def test_other_versions_are_told_with_ranks_and_hosts(pair: Path, name: str, other: str) -> None:
    ranks, topology = collect_all(config_of(pair))
    for rank in (1, 3):
        ranks[rank] = replace(ranks[rank], host="b", versions={**ranks[rank].versions, name: other})
    (problem,) = (line for line in find_misfits(ranks, topology) if "same everywhere" in line)
    own = ranks[0].versions[name]
    assert problem == (
        f"{name} is not the same everywhere: {own} on rank 0, 2 ({HOST}); {other} on rank 1, 3 (b): "
        "install one version on all hosts"
    )


def test_nccl_is_compared_among_those_that_have_it(pair: Path) -> None:
    ranks, topology = collect_all(config_of(pair))
    for rank in (2, 3):
        ranks[rank] = replace(ranks[rank], versions={**ranks[rank].versions, "NCCL": "2.28.3"})
    assert find_misfits(ranks, topology) == []
    ranks[3] = replace(ranks[3], versions={**ranks[3].versions, "NCCL": "2.27.1"})
    (problem,) = find_misfits(ranks, topology)
    assert problem.startswith("NCCL is not the same everywhere: 2.28.3 on rank 2 ")


def test_missing_models_are_told_for_every_rank(pair: Path, tmp_path: Path) -> None:
    config = config_of(pair)
    empty = tmp_path / "empty"
    empty.mkdir()
    elsewhere = config.model_copy(update={"target": config.target.model_copy(update={"model": empty})})
    gone = config.model_copy(update={"draft": config.draft.model_copy(update={"model": tmp_path / "gone"})})  # type: ignore[union-attr]
    ranks, topology = collect_all(config)
    ranks[2], ranks[3] = (take_inventory(JobSpec(elsewhere), rank) for rank in (2, 3))
    ranks[1] = take_inventory(JobSpec(gone), 1)
    assert find_misfits(ranks, topology) == [
        f"draft rank 1 (cpu:0) on {HOST}: draft: {tmp_path}/gone does not exist; give a Hugging Face model directory "
        "(config.json and *.safetensors)",
        f"target rank 2 (cpu:1) on {HOST}: target: {empty} has no config.json; give a Hugging Face model directory",
        f"target rank 3 (cpu:2) on {HOST}: target: {empty} has no config.json; give a Hugging Face model directory",
    ]


def test_weights_matter_only_where_they_are_held(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((pair / "target" / "config.json").read_bytes())
    config = config_of(pair)
    bare = config.model_copy(update={"target": config.target.model_copy(update={"model": tmp_path})})
    ranks, topology = collect_all(bare)
    assert [bool(rank.problems) for rank in ranks] == [False, False, True, True]
    assert "has no weights" in ranks[2].problems[0]
    assert len(find_misfits(ranks, topology)) == 2


def test_weights_that_loading_would_refuse_are_told_by_the_ranks_that_hold_them(pair: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(pair / "target", tmp_path / "target"))
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**values, "intermediate_size": 128}), encoding="utf-8")
    config = config_of(pair)
    other = config.model_copy(update={"target": config.target.model_copy(update={"model": model})})
    ranks, _ = collect_all(other)
    assert [bool(rank.problems) for rank in ranks] == [False, False, True, True]
    assert "mlp.gate_proj.weight' has shape [112, 64], but config.json calls for [128, 64]" in ranks[2].problems[0]


def test_different_models_under_one_path_are_told(pair: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "target", tokenizer=True, max_position_embeddings=65535)
    config = config_of(pair)
    other = config.model_copy(update={"target": config.target.model_copy(update={"model": tmp_path / "target"})})
    ranks, topology = collect_all(config)
    ranks[3] = take_inventory(JobSpec(other), 3)
    (problem,) = find_misfits(ranks, topology)
    assert problem.startswith("target: config.json or hf_quant_config.json is not the same everywhere: ")
    assert f"{ranks[3].configs['target']} on rank 3 ({HOST})" in problem
    assert "on rank 0–2" in problem


def test_engines_of_other_builds_are_told(pair: Path, tmp_path: Path) -> None:
    """Their shards have the same shapes. Where nothing of a model is held, its config.json is enough."""
    first, second = (build_engine(pair / "target", tmp_path / name, 2) for name in ("first", "second"))
    found = {"devices": ["cpu:1", "cpu:2"]}
    config, other = (config_of(pair, target={"model": str(model), **found}) for model in (first, second))
    ranks, topology = collect_all(config)
    assert find_misfits(ranks, topology) == []
    ranks[3] = take_inventory(JobSpec(other), 3)
    (problem,) = find_misfits(ranks, topology)
    assert problem.startswith("target: engine.json is not the same everywhere: ")
    assert f"{ranks[3].engines['target']} on rank 3 ({HOST}): copy one engine to all hosts" in problem
    (second / "engine.json").unlink()
    ranks[3] = take_inventory(JobSpec(config), 3)
    ranks[1] = take_inventory(JobSpec(other), 1)
    assert find_misfits(ranks, topology) == []


def test_different_commits_in_the_caches_of_hosts_are_told(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fill_cache(tmp_path, "org/target", pair / "target")
    config = config_of(pair, target={"model": "org/target", "devices": ["cpu:1", "cpu:2"]})
    ranks, topology = collect_all(config)
    assert find_misfits(ranks, topology) == []
    fill_cache(tmp_path, "org/target", pair / "target", commit=OTHER_COMMIT)
    again = config_of(pair, target={"model": "org/target", "devices": ["cpu:1", "cpu:2"]})
    ranks[3] = take_inventory(JobSpec(again), 3)
    assert find_misfits(ranks, topology) == [
        f"target: the Hugging Face caches do not have the same: org/target@{COMMIT} on rank 0–2 ({HOST}); "
        f"org/target@{OTHER_COMMIT} on rank 3 ({HOST}): name one commit (org/name@commit), and run "
        "`hf download org/name --revision commit` on each host"
    ]


def test_a_quantization_that_one_rank_alone_has_is_told(pair: Path) -> None:
    """As ModelOpt says it, beside a config.json that is the same everywhere."""
    config = config_of(pair)
    ranks, topology = collect_all(config)
    quantization = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    file = pair / "target" / "hf_quant_config.json"
    file.write_text(json.dumps(quantization), encoding="utf-8")
    try:
        ranks[0] = take_inventory(JobSpec(config), 0)
    finally:
        file.unlink()
    (problem,) = find_misfits(ranks, topology)
    assert problem.startswith("target: config.json or hf_quant_config.json is not the same everywhere: ")


def test_too_small_a_device_is_told_with_the_numbers(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.check.inventory.free_bytes_of_slot", lambda device, slots: 1 << 31)
    scheduler = {"max_batch_size": 128, "max_num_tokens": 1024}
    ranks, topology = collect_all(config_of(pair, kv_cache={"max_tokens": 10**9}, scheduler=scheduler))
    problems = find_misfits(ranks, topology)
    assert len(problems) == 3
    assert problems[1].startswith(f"target rank 2 (cpu:1) on {HOST}: kv_cache.max_tokens 1000000000 (of which ")
    assert "are free beside the weights" in problems[1] and "tokens fit" in problems[1]
    monkeypatch.setattr("launch.jobs.check.inventory.free_bytes_of_slot", lambda device, slots: 1 << 26)
    problems = find_misfits(collect_all(config_of(pair, scheduler=scheduler))[0], topology)
    assert problems[1].startswith(f"target rank 2 (cpu:1) on {HOST}: the largest round needs ")


def test_a_gpu_that_is_not_there_is_told(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(pair)
    values = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "draft")}
    values["target"]["devices"], values["draft"]["devices"] = ["cuda:97"], ["cuda:96"]
    ranks, topology = collect_all(make_config(values))
    assert [problem.partition(",")[0] for problem in find_misfits(ranks, topology)] == [
        f"draft rank 1 (cuda:96) on {HOST}: cuda:96 is not on this host",
        f"target rank 2 (cuda:97) on {HOST}: cuda:97 is not on this host",
    ]


def test_ranks_on_other_hosts_than_planned_are_told(pair: Path) -> None:
    config = config_of(pair)
    sections = {"target": {"model": str(pair / "target"), "devices": {"nowhere.invalid": ["cpu:0"], HOST: ["cpu:1"]}},
                "launch": {"orchestrator_host": HOST}}  # fmt: skip
    config = config_of(pair, **sections, draft={"model": str(pair / "draft"), "devices": {HOST: ["cpu:0"]}})
    ranks, topology = collect_all(config)
    assert find_misfits(ranks, topology) == [
        f"target rank 2 (nowhere.invalid cpu:0) runs on {HOST}, but its device is on nowhere.invalid: "
        "start the ranks on the hosts that `trtrun plan` shows, in that order"
    ]


def test_ranks_on_several_hosts_need_devices_that_name_them(pair: Path) -> None:
    ranks, topology = collect_all(config_of(pair))
    ranks[3] = replace(ranks[3], host="b")
    (problem,) = find_misfits(ranks, topology)
    assert problem.startswith(f"the ranks are on 2 hosts ({HOST}: rank 0–2; b: rank 3), but the devices name none")
