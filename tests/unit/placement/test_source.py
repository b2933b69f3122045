"""The configuration of a run: what the starting host fills in, what each host makes of it, and launchers that lie."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_tokenizer

from launch.jobs.placement import run_config
from launch.jobs.placement.run_config import (
    check_started_together,
    check_world_size,
    load_run_config,
    make_run_config,
    name_places,
)
from parallel.mpi_rank import MpiRank
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.errors import ConfigError, PlacementError


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Slurm job and no mpirun around these tests, whatever they run in."""
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on node n2 of a Slurm job of three nodes with two GPUs each."""
    for name, value in {"JOB_NODELIST": "n[1-3]", "JOB_ID": "17", "GPUS_ON_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")


def devices_of(values: dict[str, Any]) -> dict[str, list[str]]:
    return {name: list(values[name]["devices"]) for name in ("target", "draft") if name in values}


def orchestrator_of(values: dict[str, Any]) -> object:
    return (values.get("launch") or {}).get("orchestrator_host")


def test_one_host_without_a_name_stays_so() -> None:
    values = {"target": {"devices": [0]}, "draft": {"devices": ["cpu:1"]}}
    assert devices_of(name_places(values)) == {"target": ["cuda:0"], "draft": ["cpu:1"]}
    assert orchestrator_of(name_places(values)) is None


def test_the_orchestrator_is_where_the_job_is_started_if_that_host_has_a_device() -> None:
    here = socket.gethostname()
    assert orchestrator_of(name_places({"target": {"devices": {"240.0.0.1": [0], here: [0]}}})) == here
    assert orchestrator_of(name_places({"target": {"devices": {"240.0.0.1": [0]}}})) is None
    chosen = {"target": {"devices": {"240.0.0.1": [0], here: [0]}}, "launch": {"orchestrator_host": "240.0.0.1"}}
    assert orchestrator_of(name_places(chosen)) == "240.0.0.1"


@pytest.mark.usefixtures("job")
def test_counts_are_filled_from_the_slurm_job() -> None:
    values = {"target": {"devices": {"nodes": 2, "gpus_per_node": 2}}, "draft": {"devices": {"gpus_per_node": 1}}}
    assert devices_of(name_places(values)) == {
        "target": ["n1/cuda:0", "n1/cuda:1", "n2/cuda:0", "n2/cuda:1"],
        "draft": ["n3/cuda:0"],
    }
    assert orchestrator_of(name_places(values)) == "n2"


@pytest.mark.usefixtures("job")
def test_devices_without_a_host_are_this_nodes_in_a_job_of_several() -> None:
    values = {"target": {"devices": [0, 1]}, "draft": {"devices": {"gpus_per_node": 1}}}
    assert devices_of(name_places(values)) == {"target": ["n2/cuda:0", "n2/cuda:1"], "draft": ["n1/cuda:0"]}


def test_in_a_job_of_one_node_devices_stay_without_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert devices_of(name_places({"target": {"devices": [0, 1]}})) == {"target": ["cuda:0", "cuda:1"]}


@pytest.mark.usefixtures("job")
def test_names_are_those_of_the_slurm_job() -> None:
    values = {"target": {"devices": {"n3.cluster": [0], "n1": [1]}}, "draft": {"devices": ["n1.cluster/cuda:0"]}}
    assert devices_of(name_places(values)) == {"target": ["n3/cuda:0", "n1/cuda:1"], "draft": ["n1/cuda:0"]}


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{n9: [0]}", "target.devices: n9 is not in Slurm job 17 (did you mean 'n"),
        ("[n1/cuda:0, n1.cluster/cuda:0]", "target.devices: n1/cuda:0 stands more than once"),
        ("{n1: [0, 2]}", "target.devices: n1/cuda:2 is not in Slurm job 17, which has GPUs 0 to 1 on each node"),
        ("{nodes: 4, gpus_per_node: 1}", "target.devices: 4 nodes are asked for, but Slurm job 17 has 3 nodes"),
        ("{gpus_per_node: 3}", "target.devices: 3 GPUs a node are asked for, but Slurm job 17 has 2 on each"),
        ("{-oProxyCommand=x: [0]}", "target.devices: '-oProxyCommand=x' is no host"),
        ("{'a b': [0]}", "target.devices: 'a b' is no host"),
    ],
)
def test_what_the_slurm_job_has_not_is_refused_with_the_files_name(tmp_path: Path, target: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"target: {{model: {tmp_path}, devices: {target}}}\nspeculation: {{method: none}}\n")
    with pytest.raises(ConfigError) as raised:
        load_run_config(file, [])
    assert str(raised.value).startswith(f"{file}: {said}") and "\n" not in str(raised.value)


def test_one_process_reads_and_places(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("target: {model: ., devices: ['cpu:1']}\ndraft: {model: ., devices: {cpus_per_node: 1}}\n")
    config = load_run_config(file, ["threads=3"])
    assert (config.target.model, config.threads) == (tmp_path.resolve(), 3)
    assert make_topology(config).describe(1) == "draft rank 1 (cpu:0)"


# Model directories of each host.


def source(folder: Path, **sections: Any) -> dict[str, Any]:
    for name in ("here", "there", "else"):
        (folder / name).mkdir(exist_ok=True)
    target = {"model": "here", "devices": ["cpu:0"], **sections.pop("target", {})}
    values = {"target": target, "speculation": {"method": "none"}, **sections}
    return {"values": values, "base": str(folder), "where": "run.yaml"}


def made(folder: Path, paths: dict[str, Any], mpi_rank: MpiRank | None = None) -> RuntimeConfig:
    return make_run_config(source(folder, target={"model": paths}), mpi_rank)


def test_each_host_takes_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    paths = {"240.0.0.1": "there", "node1.cluster": "here", "default": "else"}
    assert made(tmp_path, paths).target.model.name == "here"
    del paths["node1.cluster"]
    assert made(tmp_path, paths).target.model.name == "else"
    config = make_run_config(source(tmp_path, tokenizer={"node1": "there", "default": "nowhere"}))
    assert config.tokenizer == (tmp_path / "there").resolve()


def test_a_host_without_a_path_is_named_and_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        made(tmp_path, {"240.0.0.1": "nowhere"})
    name = socket.gethostname()
    assert str(raised.value) == (
        f"run.yaml: target.model: no path for this host ({name}): add it beside 240.0.0.1, or a path under 'default'"
    )


def test_a_host_that_only_starts_the_ranks_takes_any_model_that_it_sees(tmp_path: Path) -> None:
    seen = {"240.0.0.1": "nowhere", "240.0.0.2": str(tmp_path / "there")}
    assert made(tmp_path, seen).target.model.name == "there"
    with pytest.raises(ConfigError, match="no path for this host"):
        made(tmp_path, seen, MpiRank(1, 2))


def test_paths_of_hosts_that_no_file_system_takes_are_no_directories() -> None:
    values = {"target": {"model": {"node1": "x" * 5000, "node2": "~nosuchuser/x", "node3": 5}, "devices": ["cpu:0"]}}
    with pytest.raises(ConfigError, match=r"target\.model: no path for this host"):
        make_run_config({"values": values, "base": "/", "where": "run.yaml"})


def test_a_missing_model_is_told_with_rank_and_host_except_by_rank_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml: target.model: no such directory"):
        made(tmp_path, {"default": "nowhere"}, MpiRank(0, 4))
    with pytest.raises(ConfigError) as raised:
        made(tmp_path, {"default": "nowhere"}, MpiRank(2, 4))
    start = f"run.yaml, on rank 2 of host {socket.gethostname()}: target.model: no such directory"
    assert str(raised.value).startswith(start)


# Processes that were started together and do not see each other.

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def test_processes_of_srun_without_mpi_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"srun started 4 processes that do not know each other.*--mpi=TYPE"):
        check_started_together(None, STEP)


@pytest.mark.parametrize(
    ("mpi_rank", "environment"),
    [
        (None, {}),
        (None, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
        (None, {"SLURM_STEP_NUM_TASKS": "4"}),
        (MpiRank(1, 4), STEP),
    ],
)
def test_ranks_and_single_processes_are_not(mpi_rank: MpiRank | None, environment: dict[str, str]) -> None:
    check_started_together(mpi_rank, environment)


def test_a_world_that_mpi_sees_otherwise_than_the_launcher_is_refused() -> None:
    check_world_size(MpiRank(3, 4), 4)
    with pytest.raises(PlacementError, match="4 processes were started together, but MPI sees a world of 1"):
        check_world_size(MpiRank(0, 4), 1)


def test_rank_0_says_how_drafts_are_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of other hosts have no say in it."""
    for name, merges in (("target", 5), ("draft", 3)):
        (tmp_path / name).mkdir()
        make_tokenizer(tmp_path / name, merges=merges)
    file = tmp_path / "run.yaml"
    file.write_text("target: {model: target, devices: ['cpu:0']}\ndraft: {model: draft, devices: ['cpu:1']}\n")
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(run_config, "find_mpi_rank", lambda: MpiRank(0, 3))
    monkeypatch.setattr(run_config, "_share", lambda source, mpi_rank: (told.append(source), source)[1])
    monkeypatch.setattr(run_config, "agree_on", lambda make, mpi_rank: make())
    config = load_run_config(file, [])
    assert config.draft is not None and config.draft.vocabulary == "intersection"
    (tmp_path / "draft" / "tokenizer.json").write_bytes((tmp_path / "target" / "tokenizer.json").read_bytes())
    other = make_run_config(told[0], MpiRank(2, 3))
    assert other.draft is not None and other.draft.vocabulary == "intersection"
