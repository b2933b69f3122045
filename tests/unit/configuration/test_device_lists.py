"""How devices are written: on hosts, as counts, and what is refused."""

from __future__ import annotations

import pytest

from trtrun.configuration.device_lists import check_host, host_of, is_counts, is_same_host, kind_of, parse_devices


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"node1": [0, 1], "node2": [0]}, ("node1/cuda:0", "node1/cuda:1", "node2/cuda:0")),
        ({"node1": 3}, ("node1/cuda:3",)),
        ({"10.77.0.1": "cpu:2"}, ("10.77.0.1/cpu:2",)),
        (["node1/cuda:0", "node-2.cluster/cpu"], ("node1/cuda:0", "node-2.cluster/cpu:0")),
    ],
)
def test_devices_on_hosts(written: object, read: tuple[str, ...]) -> None:
    assert parse_devices(written) == read
    assert [host_of(device) for device in read] == [device.split("/")[0] for device in read]
    assert {kind_of(device) for device in read} <= {"cuda", "cpu"}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"node1": [0, 0]}, "node1/cuda:0 stands more than once"),
        ({"node1": ["cpu:0", "cpu"]}, "node1/cpu:0 stands more than once"),
        (["node1/cuda:1", "node1/cuda:01"], "'node1/cuda:01' is no device"),
        ({"node1": ["node2/cuda:0"]}, "node1: 'node2/cuda:0' is no device"),
        ({"node1": [True]}, "node1: True is no device"),
        ({"node1": [-1]}, "node1: -1 is no device"),
        ({"node1": None}, "node1: None is no device"),
        ({"node1": []}, "the list is empty"),
        ({}, "the list is empty"),
        ({"-oProxyCommand=x": [0]}, "'-oProxyCommand=x' is no host"),
        ({"a b": [0]}, "'a b' is no host"),
        ({"node1;reboot": [0]}, "is no host"),
        ({"node1\n": [0]}, "is no host"),
        (["-oProxyCommand=x/cuda:0"], "'-oProxyCommand=x' is no host"),
        (["a/b/cuda:0"], "'a/b' is no host"),
        (["/cuda:0"], "'' is no host"),
    ],
)
def test_bad_devices_and_hosts_are_refused(written: object, said: str) -> None:
    with pytest.raises(ValueError, match=r"^") as raised:
        parse_devices(written)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "written", [{"nodes": 2, "gpus_per_node": 4}, {"cpus_per_node": 1}, {"gpu_per_node": 4}, {"nodes": 1}]
)
def test_counts_are_told_from_hosts_even_when_misspelt(written: object) -> None:
    assert is_counts(written)
    with pytest.raises(ValueError, match="filled in by the trtrun command"):
        parse_devices(written)


@pytest.mark.parametrize("written", [None, [], [0], "cuda:0", {}, {"node1": [0]}, {"node": [0]}])
def test_hosts_and_lists_are_no_counts(written: object) -> None:
    assert not is_counts(written)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("node1", "node1", True),
        ("node1", "node1.cluster", True),
        ("node1.cluster.local", "node1", True),
        ("node1.east", "node1.west", False),
        ("node1.east", "node1.east.cluster", False),
        ("node1", "node10", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10", "10.0.0.2", False),
        ("", "", False),
        ("", "node1", False),
    ],
)
def test_a_short_and_a_full_name_are_one_host(one: str, other: str, same: bool) -> None:
    assert is_same_host(one, other) is is_same_host(other, one) is same


@pytest.mark.parametrize("host", ["", "-x", "x-", ".x", "a b", "a/b", "a:1", "a@b", "$(x)", "a\n", 3, None])
def test_what_may_not_reach_a_command_line_is_no_host(host: object) -> None:
    with pytest.raises(ValueError, match="is no host"):
        check_host(host)
