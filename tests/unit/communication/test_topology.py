"""Topology: who sits where, from device lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import ParallelError, TopologyError
from parallel.topology import Role, Slot, Topology

device_lists = st.lists(st.integers(0, 7).map("cpu:{}".format), unique=True, max_size=6)
some_devices = device_lists.filter(bool)


def test_one_orchestrator_one_draft_two_targets() -> None:
    topology = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
    assert topology.world_size == 4
    assert topology.slots == (Slot("cpu:0", 1, 0, None), Slot("cpu:1", 2, None, 0), Slot("cpu:2", 3, None, 1))
    assert topology.roles(0) == (Role.ORCHESTRATOR,)
    assert topology.roles(1) == (Role.DRAFT,)
    assert topology.roles(3) == (Role.TARGET,)
    assert (topology.draft_leader, topology.target_leader) == (1, 2)
    assert topology.worker_ranks == (1, 2, 3)


def test_a_device_of_both_lists_is_one_slot() -> None:
    topology = Topology.from_devices(["cuda:0"], ["cuda:0", "cuda:1"])
    assert topology.world_size == 3
    assert topology.roles(1) == (Role.DRAFT, Role.TARGET)
    assert topology.slot(1) == Slot("cuda:0", 1, 0, 0)
    assert topology.draft_leader == topology.target_leader == 1


def test_tensor_parallel_order_follows_each_list_not_the_world() -> None:
    topology = Topology.from_devices(["cpu:0", "cpu:1"], ["cpu:1", "cpu:2", "cpu:0"])
    assert topology.draft_ranks == (1, 2)
    assert topology.target_ranks == (2, 3, 1)
    assert topology.target_leader == 2


@pytest.mark.parametrize("draft", [[], ["cpu:0"]])
def test_a_single_slot_is_a_world_of_one(draft: list[str]) -> None:
    topology = Topology.from_devices(draft, ["cpu:0"])
    assert topology.world_size == 1
    assert topology.roles(0) == (Role.ORCHESTRATOR, *([Role.DRAFT] if draft else []), Role.TARGET)
    assert topology.worker_ranks == (0,)


def test_without_a_draft_there_is_no_draft_rank() -> None:
    topology = Topology.from_devices([], ["cpu:0", "cpu:1"])
    assert topology.world_size == 3
    assert topology.draft_ranks == ()
    assert topology.draft_leader is None


@pytest.mark.parametrize(
    ("draft", "target", "rank", "name"),
    [
        (["cpu:0"], ["cpu:1"], 0, "orchestrator rank 0 (host)"),
        (["cpu:0"], ["cpu:1"], 1, "draft rank 1 (cpu:0)"),
        (["cuda:0"], ["cuda:1", "cuda:0"], 1, "draft+target rank 1 (cuda:0)"),
        (["cpu:0"], ["cpu:0"], 0, "orchestrator+draft+target rank 0 (cpu:0)"),
    ],
)
def test_ranks_are_named_for_messages(draft: list[str], target: list[str], rank: int, name: str) -> None:
    assert Topology.from_devices(draft, target).describe(rank) == name


@pytest.mark.parametrize(
    ("draft", "target", "words"),
    [
        ([], [], "target has no device"),
        (["cpu:0"], [], "target has no device"),
        (["cpu:0", "cpu:0"], ["cpu:1"], "draft.devices lists cpu:0 twice"),
        (["cpu:0"], ["cpu:1", "cpu:1"], "target.devices lists cpu:1 twice"),
        (["cpu:0"], [""], "target.devices holds ''"),
    ],
)
def test_wrong_device_lists_are_refused_in_one_line(draft: list[str], target: list[str], words: str) -> None:
    with pytest.raises(TopologyError, match=words) as error:
        Topology.from_devices(draft, target)
    assert "\n" not in str(error.value)


def test_a_world_of_another_size_is_refused_with_the_places() -> None:
    topology = Topology.from_devices(["cpu:0"], ["cpu:1"])
    topology.check_world(3)
    with pytest.raises(ParallelError, match=r"need 3 ranks .*draft rank 1 \(cpu:0\).* but 2 were started"):
        topology.check_world(2)


def test_ranks_outside_the_world_are_refused() -> None:
    with pytest.raises(TopologyError, match="no rank 3"):
        Topology.from_devices(["cpu:0"], ["cpu:1"]).roles(3)


@given(draft=device_lists, target=some_devices)
def test_every_device_has_exactly_one_rank_and_keeps_its_engine_order(draft: list[str], target: list[str]) -> None:
    topology = Topology.from_devices(draft, target)
    devices = {slot.rank: slot.device for slot in topology.slots}
    assert sorted(devices.values()) == sorted({*draft, *target})
    assert [devices[rank] for rank in topology.draft_ranks] == draft
    assert [devices[rank] for rank in topology.target_ranks] == target
    assert topology.world_size == (1 if len(devices) == 1 else len(devices) + 1)
    assert sorted({topology.orchestrator_rank, *topology.worker_ranks}) == list(range(topology.world_size))
    for rank in range(topology.world_size):
        assert (Role.DRAFT in topology.roles(rank)) == (rank in topology.draft_ranks)
        assert (Role.TARGET in topology.roles(rank)) == (rank in topology.target_ranks)
        assert (Role.ORCHESTRATOR in topology.roles(rank)) == (rank == 0)
