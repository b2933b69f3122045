"""What a job needs of Slurm, from the devices alone: nodes, ranks on each, GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.jobs.batch.resources import BatchResources, read_resources
from launch.jobs.slurm.section import SlurmSection, count_gres_gpus
from trtrun.configuration.yaml_source import read_values
from trtrun.errors import ConfigError


def read_file(file: Path, overrides: Sequence[str] = (), changes: dict[str, object] | None = None) -> BatchResources:
    return read_resources(file, read_values(file, overrides), SlurmSection, changes)


def resources_of(
    folder: Path, target: Any, draft: Any = None, others: dict[str, Any] | None = None, **slurm: Any
) -> BatchResources:
    values: dict[str, Any] = {
        **(others or {}),
        "target": {"model": "asset:target", "devices": target},
        "speculation": {"method": "none" if draft is None else "draft_target"},
        "launch": {"slurm": slurm},
    }
    if draft is not None:
        values["draft"] = {"model": "asset:draft", "devices": draft}
    file = folder / "run.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return read_file(file)


def places(resources: BatchResources) -> list[str]:
    topology = resources.topology
    devices = ((topology.host(rank), topology.slot(rank)) for rank in range(topology.world_size))
    return [f"{host} {slot.device if slot else '-'}" for host, slot in devices]


def test_devices_of_no_host_are_the_first_nodes(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, [1, 2], [0])
    assert (resources.nodes, resources.tasks_per_node, resources.gpus, resources.named) == (1, 4, 3, ())
    assert places(resources) == ["node-1 -", "node-1 cuda:0", "node-1 cuda:1", "node-1 cuda:2"]


def test_one_device_is_one_process(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, ["cpu:0"], ["cpu:0"])
    assert (resources.nodes, resources.tasks_per_node, resources.gpus) == (1, 1, 0)


@pytest.mark.parametrize(
    ("devices", "others", "slurm", "cores"),
    [
        (["cpu:0"], {}, {}, None),
        (["cpu:0"], {"threads": 8}, {}, 8),
        (["cpu:0"], {"threads": 8}, {"cpus_per_task": 3}, 3),
        ([0], {}, {}, 2),
        ([0], {"threads": 8}, {}, 2),
    ],
)
def test_ranks_get_the_cores_that_they_compute_on(
    tmp_path: Path, devices: Any, others: dict[str, Any], slurm: dict[str, Any], cores: int | None
) -> None:
    resources = resources_of(tmp_path, devices, others=others, **slurm)
    assert resources.cpus_per_task == cores and resources.lacks_cores == (cores is None)


def test_counts_take_nodes_that_do_not_exist_yet(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"nodes": 2, "gpus_per_node": 4}, {"gpus_per_node": 1})
    assert (resources.nodes, resources.tasks_per_node, resources.gpus, resources.named) == (2, 5, 4, ())
    assert places(resources)[:2] == ["node-1 -", "node-1 cuda:0"]
    assert places(resources)[-1] == "node-2 cuda:3"


def test_a_node_more_is_the_drafts_own(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"nodes": 2, "gpus_per_node": 2}, {"gpus_per_node": 2}, nodes=3)
    assert resources.nodes == 3
    assert [place for place in places(resources) if place.startswith("node-3")] == ["node-3 cuda:0", "node-3 cuda:1"]


def test_a_gpu_more_is_the_drafts_own(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"nodes": 2, "gpus_per_node": 2}, {"gpus_per_node": 1}, gres="gpu:a100:3")
    assert (resources.gpus, places(resources)[1]) == (3, "node-1 cuda:2")


def test_cpu_slots_are_everyones_own(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"nodes": 2, "cpus_per_node": 2}, {"cpus_per_node": 1})
    assert (resources.tasks_per_node, places(resources)[1]) == (4, "node-1 cpu:2")


def test_named_hosts_come_as_slurm_orders_them(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"node10": [0, 1], "node2": [0, 1]}, {"node9": [0]})
    assert (resources.nodes, resources.named) == (3, ("node2", "node9", "node10"))
    # Slurm runs the script on the first of its nodes, and rank 0 is where the script is.
    assert resources.topology.host(0) == "node2"


def test_named_and_counted_hosts_are_not_mixed_up(tmp_path: Path) -> None:
    resources = resources_of(tmp_path, {"nodes": 2, "gpus_per_node": 1}, {"gpu7": [0]}, nodes=3)
    assert resources.named == ("gpu7",)
    assert sorted(resources.hosts) == ["gpu7", "node-2", "node-3"]


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu", 1), ("gpu:4", 4), ("gpu:a100:2", 2), ("gpu:a100", 1), ("gres:gpu:3", 3), ("gpu:h100:2,gpu:a100:1", 3),
        ("shard:2", None), ("gpu:2,shard:8", 2), ("gpu:tesla:2(S:0)", 2), (None, None), ("gpus:2", None),
    ],
)  # fmt: skip
def test_gpus_in_gres_are_counted(gres: str | None, count: int | None) -> None:
    assert count_gres_gpus(gres) == count


@pytest.mark.parametrize(
    ("devices", "slurm", "said"),
    [
        ([0, 1], {"gres": "gpu:1"}, "launch.slurm.gres: 'gpu:1' asks for 1 GPUs a node, but the devices need 2"),
        ([0, 1], {"nodes": 2}, "launch.slurm.nodes: 2 nodes are to be asked for, but the devices use 1"),
        ({"a": [0], "b": [0]}, {"nodes": 1}, "1 nodes are to be asked for, but the devices use 2"),
        ({"nodes": 0, "gpus_per_node": 1}, {}, "target.devices.nodes: must be a number of 1 or more, not 0"),
        ({"nodes": 2, "gpu_per_node": 1}, {}, "unknown key (did you mean 'gpus_per_node'?)"),
        ([0], {"partitoin": "x"}, "unknown key (did you mean 'partition'?)"),
        ([0], {"requeue": "sometimes"}, "launch.slurm.requeue: "),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, devices: Any, slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resources_of(tmp_path, devices, **slurm)
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'run.yaml'}: ")


def test_models_of_other_hosts_are_not_looked_for_here(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    section = {"model": {"default": "/models/of/the/compute/nodes"}, "devices": [0]}
    file.write_text(json.dumps({"target": section, "speculation": {"method": "none"}}), encoding="utf-8")
    assert not read_file(file).has_local_models
    file.write_text(
        json.dumps({"target": {**section, "model": "/no/such"}, "speculation": {"method": "none"}}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="no such directory: /no/such"):
        read_file(file)


@pytest.mark.parametrize(("written", "time"), [("2:00:00", "2:00:00"), ("90", "90"), ('"1:30:00"', "1:30:00")])
def test_a_time_is_what_is_written_with_quotes_and_without(tmp_path: Path, written: str, time: str) -> None:
    file = tmp_path / "run.yaml"
    target = "target: {model: asset:target, devices: [cpu:0]}\nspeculation: {method: none}\n"
    file.write_text(f"{target}launch: {{slurm: {{time: {written}}}}}\n", encoding="utf-8")
    assert read_file(file).section_as(SlurmSection).time == time
    assert read_file(file, ["launch.slurm.time=1:30:00"]).section_as(SlurmSection).time == "1:30:00"


def test_command_line_options_change_the_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for launch in ({}, {"launch": None}, {"launch": {"slurm": None}}, {"launch": {"slurm": {"time": "1"}}}):
        values = {"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
        file.write_text(json.dumps({**values, **launch}), encoding="utf-8")
        slurm = read_resources(
            file, read_values(file, []), SlurmSection, {"time": "2:00:00", "partition": "p"}
        ).section_as(SlurmSection)
        assert (slurm.time, slurm.partition) == ("2:00:00", "p")
    file.write_text(json.dumps({**values, "launch": {"slurm": "x"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"launch\.slurm: must be a section with keys, not 'x'"):
        read_file(file)
