"""Which transport every pair of ranks will use, against the rule by which communicators are opened."""

from __future__ import annotations

import pytest
import torch

from launch.jobs.placement.links import (
    Carries,
    Kind,
    Transport,
    expect_kinds,
    group_ranks,
    list_links,
    show_ranks,
    summarize_links,
)
from parallel.groups import open_groups
from parallel.topology import Topology


def links_of(topology: Topology, nccl: bool, sends_probs: bool = False) -> dict[tuple[str, int, int], str]:
    """Transport by what travels and between whom."""
    links = list_links(topology, expect_kinds(topology, nccl), sends_probs)
    found = {(str(link.carries), *link.ranks): str(link.transport) for link in links}
    assert len(found) == len(links), "a pair stands twice for the same"
    return found


def test_cpu_ranks_of_one_host() -> None:
    topology = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
    assert links_of(topology, nccl=True) == {
        ("plans and reports", 0, 1): "MPI, shared memory",
        ("plans and reports", 0, 2): "MPI, shared memory",
        ("plans and reports", 0, 3): "MPI, shared memory",
        ("heartbeat", 0, 1): "TCP, one host",
        ("heartbeat", 0, 2): "TCP, one host",
        ("heartbeat", 0, 3): "TCP, one host",
        ("target all_reduce", 2, 3): "MPI, shared memory",
        ("draft tokens", 1, 2): "MPI, shared memory",
        ("draft tokens", 1, 3): "MPI, shared memory",
        ("verdict", 2, 1): "MPI, shared memory",
        ("verdict", 2, 3): "MPI, shared memory",
    }


def test_gpus_of_two_hosts_with_nccl() -> None:
    topology = Topology.from_devices(["b/cuda:0"], ["a/cuda:0", "a/cuda:1"], "a")
    assert links_of(topology, nccl=True, sends_probs=True) == {
        ("plans and reports", 0, 1): "MPI over network",
        ("plans and reports", 0, 2): "MPI, shared memory",
        ("plans and reports", 0, 3): "MPI, shared memory",
        ("heartbeat", 0, 1): "TCP over network",
        ("heartbeat", 0, 2): "TCP, one host",
        ("heartbeat", 0, 3): "TCP, one host",
        ("target all_reduce", 2, 3): "NCCL, one host",
        ("draft tokens, draft_probs", 1, 2): "NCCL over network",
        ("draft tokens", 1, 3): "NCCL over network",
        ("verdict", 2, 1): "NCCL over network",
        ("verdict", 2, 3): "NCCL, one host",
    }


def test_gpus_without_nccl_go_through_the_host() -> None:
    topology = Topology.from_devices(["a/cuda:0"], ["a/cuda:0", "b/cuda:0"], "a")
    found = links_of(topology, nccl=False)
    assert found["target all_reduce", 1, 2] == "MPI with host staging, over network"
    assert found["draft tokens", 1, 1] == found["verdict", 1, 1] == "same process"
    assert found["draft tokens", 1, 2] == "MPI with host staging, over network"
    assert found["plans and reports", 0, 1] == "MPI, shared memory"
    one_host = Topology.from_devices(["cuda:0"], ["cuda:1"])
    assert links_of(one_host, nccl=False)["draft tokens", 1, 2] == "MPI with host staging, one host"


def test_one_process_talks_to_itself() -> None:
    topology = Topology.from_devices(["cuda:0"], ["cuda:0"])
    assert set(links_of(topology, nccl=True).values()) == {"same process"}
    alone = Topology.from_devices([], ["cpu:0"])
    assert list(links_of(alone, nccl=False)) == [("plans and reports", 0, 0)]


def test_every_draft_all_reduce_pair_is_there_and_no_group_of_one() -> None:
    devices = [f"cuda:{index}" for index in range(4)]
    found = links_of(Topology.from_devices(devices, devices), nccl=True)
    pairs = [key for key in found if key[0] == "draft all_reduce"]
    assert len(pairs) == 6
    assert not [key for key in links_of(Topology.from_devices(["cuda:0"], devices), True) if key[0] == pairs[0][0]]


def test_the_expected_kinds_are_those_that_open_in_one_process() -> None:
    topology = Topology.from_devices(["cpu:0"], ["cpu:0"])
    groups = open_groups(None, topology, torch.device("cpu"))
    for name, kind in expect_kinds(topology, nccl=True).items():
        assert type(getattr(groups, name)).__name__ == "SoloCommunicator"
        assert kind is Kind.SOLO
    assert group_ranks(topology, "workers") == (0,)


def test_rows_put_pairs_together() -> None:
    topology = Topology.from_devices(["b/cuda:0"], ["a/cuda:0", "a/cuda:1", "a/cuda:2", "b/cuda:0"], "a")
    rows = summarize_links(list_links(topology, expect_kinds(topology, True), False))
    shown = {(row.carries, row.transport): row.ranks for row in rows}
    assert shown[Carries.TARGET_SUMS, Transport.NCCL_ONE_HOST] == "2–4, all pairs"
    assert shown[Carries.TARGET_SUMS, Transport.NCCL_NETWORK] == "1↔2 1↔3 1↔4"
    assert shown[Carries.DRAFT, Transport.NCCL_NETWORK] == "1→2–4"
    assert shown[Carries.DRAFT, Transport.SAME_PROCESS] == "1→1"
    assert shown[Carries.VERDICT, Transport.NCCL_ONE_HOST] == "2→3, 4"


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [([], ""), ([3], "3"), ([1, 2], "1, 2"), ([3, 1, 2], "1–3"), ([0, 1, 2, 5, 7, 8], "0–2, 5, 7, 8")],
)
def test_ranks_for_people(ranks: list[int], shown: str) -> None:
    assert show_ranks(ranks) == shown
