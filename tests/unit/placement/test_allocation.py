"""The allocation: Slurm's lists of hosts, counts of GPUs, and which host is this one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.jobs.placement.allocation import (
    MOST_HOSTS,
    expand_hosts,
    find_allocation,
    find_local,
    in_allocation,
    is_local,
)
from launch.jobs.placement.devices import Allocation
from trtrun.errors import ConfigError

names = st.from_regex(r"[a-z][a-z0-9]{0,3}(-[a-z])?", fullmatch=True)
ranges = st.builds(
    lambda first, length, width: (f"{first:0{width}d}-{first + length:0{width}d}", first, first + length, width),
    st.integers(0, 120),
    st.integers(0, 12),
    st.integers(1, 4),
).map(lambda piece: (piece[0], [f"{number:0{piece[3]}d}" for number in range(piece[1], piece[2] + 1)]))
brackets = st.lists(ranges, min_size=1, max_size=3).map(
    lambda pieces: (f"[{','.join(text for text, _ in pieces)}]", [number for _, some in pieces for number in some])
)
plain = names.map(lambda name: (name, [name]))
items = st.one_of(
    plain,
    st.builds(lambda name, bracket: (name + bracket[0], [name + end for end in bracket[1]]), names, brackets),
    st.builds(
        lambda name, one, middle, two: (
            name + one[0] + middle + two[0],
            [name + first + middle + second for first in one[1] for second in two[1]],
        ),
        names,
        brackets,
        names,
        brackets,
    ),
)
host_lists = st.lists(items, min_size=1, max_size=4).map(
    lambda some: (",".join(text for text, _ in some), [host for _, hosts in some for host in hosts])
)


@given(host_lists)
def test_compressed_lists_are_expanded_in_their_order(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node", ["node"]),
        ("n[1-2,05],login", ["n1", "n2", "n05", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-010]", ["n9", "n10"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("n1, n2,", ["n1", "n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
    ],
)
def test_lists_as_they_are_written(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1]", "n]1[", "n[[1]]", "n[]", "n[a]", "n[1,]", "n[5-3]", "n[1--2]", "n[-1]", "n[1-99999999999]"]
)
def test_what_is_no_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        expand_hosts(text)
    assert "is no list of hosts" in str(raised.value) and "\n" not in str(raised.value)


def test_a_list_may_name_as_many_hosts_as_slurm_takes_and_no_more() -> None:
    assert len(expand_hosts(f"n[1-{MOST_HOSTS}]")) == MOST_HOSTS
    with pytest.raises(ConfigError, match=f"more than {MOST_HOSTS}"):
        expand_hosts(f"n[1-{MOST_HOSTS}],one")


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Slurm's own scontrol expands lists; no daemon is needed for that."""
    if shutil.which("scontrol") is None:
        pytest.skip("needs Slurm: install the packages slurm-wlm and munge")
    file = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    file.write_text("ClusterName=t\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=main Nodes=ALL\n")
    return {**os.environ, "SLURM_CONF": str(file)}


@settings(max_examples=15, deadline=None)
@given(case=host_lists)
def test_slurm_itself_expands_lists_to_the_same(scontrol: dict[str, str], case: tuple[str, list[str]]) -> None:
    words = ["scontrol", "show", "hostnames", case[0]]
    done = subprocess.run(words, env=scontrol, capture_output=True, text=True, timeout=60, check=True)
    assert expand_hosts(case[0]) == done.stdout.split()


JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("environment", "gpus", "cpus"),
    [
        ({}, None, None),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4, None),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 2, None),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1, None),
        ({"SLURM_CPUS_ON_NODE": "16"}, None, 16),
        ({"SLURM_JOB_CPUS_PER_NODE": "16,8(x2)"}, None, 8),  # as a shell of salloc on a login node has it
        ({"SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_CPUS_ON_NODE": "2"}, None, 4),  # in a step, as outside
        ({"SLURM_GPUS": "5", "SLURM_GPUS_ON_NODE": "3"}, None, None),
        ({"SLURM_GPUS": "6", "SLURM_GPUS_PER_NODE": "3", "SLURM_GPUS_ON_NODE": "3"}, 3, None),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "3"}, 3, None),
    ],
)
def test_the_environment_of_a_slurm_job(environment: dict[str, str], gpus: int | None, cpus: int | None) -> None:
    hosts = ("n1",) if "SLURM_JOB_NODELIST" in environment else ("n1", "n2")
    assert find_allocation({**JOB, **environment}) == Allocation(hosts, gpus, cpus, "Slurm job 17")


def test_outside_slurm_the_allocation_is_this_host_without_a_name() -> None:
    allocation = find_allocation({})
    assert allocation.hosts == ("",)
    assert allocation.cpus == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("hosts", ["n[1", "-oProxyCommand=x", "n1,a b;c"])
def test_a_node_list_that_no_host_can_be_named_by_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST: "):
        find_allocation({**JOB, "SLURM_JOB_NODELIST": hosts})


@pytest.mark.parametrize(
    ("own", "slurm", "host", "local"),
    [
        ("node1", "", "node1", True),
        ("node1", "", "node1.cluster", True),
        ("node1.cluster", "", "node1", True),
        ("node1.cluster", "", "node1.cluster", True),
        ("node1", "", "localhost", True),
        ("node1", "", "", True),
        ("node1", "", "127.0.0.1", True),
        ("node1.east", "", "node1.west", False),
        ("node1", "", "240.0.0.1", False),
        ("host", "n2", "n2", True),
        ("host", "n2", "n2.cluster", True),
        ("n2", "n1", "n2", True),
        ("n2", "n1", "n1", False),
    ],
)
def test_which_host_is_this_one(monkeypatch: pytest.MonkeyPatch, own: str, slurm: str, host: str, local: bool) -> None:
    # Names that are no host of any network are asked of the resolver last, which must not delay the test.
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", _only_numbers(socket.getaddrinfo))
    monkeypatch.setenv("SLURMD_NODENAME", slurm)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]" if slurm else "")
    assert is_local(host) is local


def test_the_local_host_is_found_by_name_before_any_address_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"the resolver was asked for {arguments[0]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert find_local(["far.away.test", "n2"]) == "n2"
    monkeypatch.undo()
    assert find_local(["240.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert find_local(["240.0.0.1"]) is None
    assert find_local([]) is None


def _only_numbers(getaddrinfo):  # type: ignore[no-untyped-def]
    def ask(host: str, *arguments: object, **options: object):  # type: ignore[no-untyped-def]
        return getaddrinfo(host, *arguments, **{**options, "flags": socket.AI_NUMERICHOST})

    return ask


def test_the_nodes_of_a_pbs_job_are_those_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("x3.cluster\nx3.cluster\nx1.cluster\nx1.cluster\n", encoding="utf-8")
    job = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(file)}
    assert in_allocation(job) and not in_allocation({"PBS_NODEFILE": str(file)})
    found = find_allocation(job)
    assert (found.hosts, found.gpus, found.cpus) == (("x3.cluster", "x1.cluster"), None, 2)
    assert found.source == "PBS job 12"
    granted = find_allocation({**job, "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "NCPUS": "8"})
    assert (granted.gpus, granted.cpus) == (2, 8)
    file.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="names no host"):
        find_allocation(job)
    file.unlink()
    with pytest.raises(ConfigError, match=r"PBS_NODEFILE: .*No such file"):
        find_allocation(job)
