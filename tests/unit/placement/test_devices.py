"""Placement: counts filled from an allocation, one name a host, nothing beyond what is granted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.jobs.placement.devices import (
    Allocation,
    check_granted,
    count_host_slots,
    fill_counts,
    list_devices,
    spell_hosts,
)
from parallel.topology import Role, Topology
from trtrun.errors import ConfigError


def allocated(nodes: int, gpus: int | None, cpus: int | None = 8) -> Allocation:
    return Allocation(tuple(f"n{index + 1}" for index in range(nodes)), gpus, cpus, "Slurm job 17")


def filled(target: object, draft: object, allocation: Allocation) -> tuple[list[str], list[str]]:
    values = fill_counts({"target": {"devices": target}, "draft": {"devices": draft}}, lambda: allocation)
    return list(values["target"]["devices"]), list(values["draft"]["devices"])


def refusal(values: dict[str, Any], allocation: Allocation) -> str:
    with pytest.raises(ConfigError) as raised:
        check_granted(fill_counts(values, lambda: allocation), allocation)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def hosts_of(devices: list[str]) -> list[str]:
    return [device.partition("/")[0] for device in devices]


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4))


@given(nodes=st.integers(1, 4), gpus=st.integers(1, 8), target=sizes, draft=sizes)
def test_counts_become_devices_that_the_allocation_has(
    nodes: int, gpus: int, target: tuple[int, int], draft: tuple[int, int]
) -> None:
    assume(max(target[0], draft[0]) <= nodes and max(target[1], draft[1]) <= gpus)
    wanted = [{"nodes": count, "gpus_per_node": per_node} for count, per_node in (target, draft)]
    engines = filled(*wanted, allocated(nodes, gpus))
    granted = {f"n{node + 1}/cuda:{gpu}" for node in range(nodes) for gpu in range(gpus)}
    for devices, (count, per_node) in zip(engines, (target, draft), strict=True):
        assert set(devices) <= granted
        assert len(devices) == len(set(devices)) == count * per_node
        # A tensor-parallel group is on as few hosts as asked for, and its ranks on a host follow one another.
        changes = sum(one != other for one, other in zip(hosts_of(devices), hosts_of(devices)[1:], strict=False))
        assert len(set(hosts_of(devices))) == count == changes + 1
    free = [sum(device.startswith(f"n{node + 1}/") for device in granted - set(engines[0])) for node in range(nodes)]
    has_room = sum(left >= draft[1] for left in free) >= draft[0]
    assert set(engines[0]).isdisjoint(engines[1]) == has_room


@given(nodes=st.integers(1, 4), gpus=st.integers(1, 8), target=sizes, draft=sizes)
def test_ranks_are_in_the_order_orchestrator_draft_target_and_a_shared_device_is_one_process(
    nodes: int, gpus: int, target: tuple[int, int], draft: tuple[int, int]
) -> None:
    assume(max(target[0], draft[0]) <= nodes and max(target[1], draft[1]) <= gpus)
    wanted = [{"nodes": count, "gpus_per_node": per_node} for count, per_node in (target, draft)]
    target_devices, draft_devices = filled(*wanted, allocated(nodes, gpus))
    topology = Topology.from_devices(draft_devices, target_devices)
    places = [f"{slot.host}/{slot.device}" for slot in topology.slots]
    assert len(set(places)) == len(places)
    assert set(places) == {*draft_devices, *target_devices}
    assert [places[rank - topology.slots[0].rank] for rank in topology.draft_ranks] == draft_devices
    assert [places[rank - topology.slots[0].rank] for rank in topology.target_ranks] == target_devices
    if topology.world_size == 1:
        return
    assert topology.world_size == len(places) + 1
    assert topology.roles(0) == (Role.ORCHESTRATOR,)
    assert places[: len(draft_devices)] == draft_devices
    assert topology.host(0) == target_devices[0].partition("/")[0]


def test_a_draft_gets_free_devices_first_on_the_targets_host_then_elsewhere_and_shares_when_none_is_left() -> None:
    one, four = {"gpus_per_node": 1}, {"gpus_per_node": 4}
    assert filled(four, one, allocated(2, 8))[1] == ["n1/cuda:4"]
    assert filled(four, one, allocated(2, 4))[1] == ["n2/cuda:0"]
    assert filled(four, one, allocated(1, 4))[1] == ["n1/cuda:0"]
    assert filled({"nodes": 2, "gpus_per_node": 4}, one, allocated(2, 4))[1] == ["n1/cuda:0"]


def test_counted_devices_keep_clear_of_named_ones() -> None:
    assert filled({"n1": [0, 1]}, {"gpus_per_node": 1}, allocated(1, 4))[1] == ["n1/cuda:2"]
    assert filled({"gpus_per_node": 2}, ["n1/cuda:0"], allocated(1, 4))[0] == ["n1/cuda:1", "n1/cuda:2"]


def test_on_one_host_without_a_name_devices_have_none_either() -> None:
    here = Allocation(("",), 2, 4, "this host")
    assert filled({"gpus_per_node": 2}, {"gpus_per_node": 1}, here) == (["cuda:0", "cuda:1"], ["cuda:0"])
    assert filled({"cpus_per_node": 2}, {"cpus_per_node": 1}, here) == (["cpu:0", "cpu:1"], ["cpu:2"])


def test_cpu_slots_may_outnumber_cores() -> None:
    assert filled({"cpus_per_node": 3}, {"cpus_per_node": 1}, allocated(1, None, 2))[0] == [
        f"n1/cpu:{index}" for index in range(3)
    ]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_nothing_is_asked_of_the_machine_where_nothing_is_counted(method: str) -> None:
    def refuse() -> Allocation:
        raise AssertionError("the allocation was asked for")

    draft = {"devices": {"gpus_per_node": 1}}
    values = {"target": {"devices": [0]}, "draft": draft, "speculation": {"method": method}}
    assert fill_counts(values, refuse) == values


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"nodes": 3, "gpus_per_node": 1}, "target.devices: 3 nodes are asked for, but Slurm job 17 has 2 nodes"),
        ({"gpus_per_node": 5}, "target.devices: 5 GPUs a node are asked for, but Slurm job 17 has 4 on each"),
        ({"gpu_per_node": 2}, "target.devices.gpu_per_node: unknown key (did you mean 'gpus_per_node'?)"),
        ({"node": 2, "gpus_per_node": 2}, "target.devices.node: unknown key (did you mean 'nodes'?)"),
        ({"nodes": 2}, "write gpus_per_node or cpus_per_node beside nodes"),
        ({"gpus_per_node": 1, "cpus_per_node": 1}, "write gpus_per_node or cpus_per_node beside nodes, one of them"),
        ({"nodes": 0, "gpus_per_node": 1}, "target.devices.nodes: must be a number of 1 or more, not 0"),
        ({"nodes": True, "gpus_per_node": 1}, "target.devices.nodes: must be a number of 1 or more, not True"),
        ({"gpus_per_node": "4"}, "target.devices.gpus_per_node: must be a number of 1 or more, not '4'"),
    ],
)
def test_counts_that_cannot_be_filled_are_refused(counts: dict[str, Any], said: str) -> None:
    assert said in refusal({"target": {"devices": counts}}, allocated(2, 4))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ({"n3": [0]}, "target.devices: n3 is not in Slurm job 17 (did you mean 'n"),
        ({"login": [0]}, "target.devices: login is not in Slurm job 17 (known: n1, n2): name its hosts, or ask for"),
        ({"n1": [0, 4]}, "target.devices: n1/cuda:4 is not in Slurm job 17, which has GPUs 0 to 3 on each node"),
        ([7], "target.devices: cuda:7 is not in Slurm job 17, which has GPUs 0 to 3"),
    ],
)
def test_devices_beyond_the_allocation_are_refused(devices: object, said: str) -> None:
    assert said in refusal({"target": {"devices": devices}}, allocated(2, 4))


def test_an_allocation_without_gpus_says_so_and_one_of_unknown_size_does_not_refuse() -> None:
    values = {"target": {"devices": {"n1": [0]}}}
    assert "which has no GPU on each node" in refusal(values, allocated(1, 0))
    check_granted({"target": {"devices": {"n1": [90]}}}, allocated(1, None))
    check_granted({"target": {"devices": {"n1": ["cpu:90"]}}}, allocated(1, 0))


def test_a_host_has_one_name_wherever_it_stands() -> None:
    values = {
        "target": {"model": "a", "devices": {"node1.cluster": [0], "node2": [0]}},
        "draft": {"devices": ["node1/cuda:1"]},
        "launch": {"orchestrator_host": "node2.cluster"},
    }
    assert spell_hosts(values) == {
        "target": {"model": "a", "devices": ["node1.cluster/cuda:0", "node2/cuda:0"]},
        "draft": {"devices": ["node1.cluster/cuda:1"]},
        "launch": {"orchestrator_host": "node2"},
    }
    spelled = spell_hosts(values, ["node2.cluster", "node1"])
    assert spelled["target"]["devices"] == ["node1/cuda:0", "node2.cluster/cuda:0"]
    assert spelled["launch"] == {"orchestrator_host": "node2.cluster"}


def test_devices_without_a_host_are_the_home_hosts() -> None:
    values = {"target": {"devices": [0, 1]}, "draft": {"devices": {"gpus_per_node": 1}}}
    assert spell_hosts(values) == {"target": {"devices": ["cuda:0", "cuda:1"]}, "draft": values["draft"]}
    assert spell_hosts(values, ["n1", "n2"], "n2")["target"]["devices"] == ["n2/cuda:0", "n2/cuda:1"]


def test_wrong_sections_are_left_for_the_configuration_to_refuse() -> None:
    values: dict[str, Any] = {
        "target": {"devices": {"node1": [0, 0]}},
        "draft": 3,
        "launch": ["x"],
        "speculation": "none",
    }
    assert list_devices(values) == {}
    assert spell_hosts(values) == values
    assert fill_counts(values, lambda: allocated(1, 1)) == values


def test_slots_are_counted_by_host() -> None:
    topology = Topology.from_devices(["n2/cpu:0"], ["n1/cpu:0", "n1/cpu:1", "n2/cpu:1"])
    assert (count_host_slots(topology, "n1"), count_host_slots(topology, "n2")) == (2, 2)


def test_counts_of_a_heads_own_devices_are_filled_too_and_those_of_other_methods_are_nobodys() -> None:
    counted = {"model": "x", "devices": {"gpus_per_node": 1}}
    for method, expected in (("eagle3", ["n1/cuda:1"]), ("ngram", {"gpus_per_node": 1})):
        values = {"target": counted, "draft": counted, "speculation": {"method": method}}
        filled_in = fill_counts(values, lambda: allocated(1, 2))
        assert filled_in["target"]["devices"] == ["n1/cuda:0"] and filled_in["draft"]["devices"] == expected
