"""The probe between real ranks: it passes what is right, and finds what a broken transport does to one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from topologies import HERE

from launch.jobs.placement.links import GROUPS, expect_kinds
from parallel import probe
from parallel.communicator import Communicator
from parallel.control import ControlPlane
from parallel.errors import CommunicatorError, ControlPlaneError
from parallel.groups import open_groups
from parallel.topology import Topology
from parallel.transports import open_communicator

pytestmark = pytest.mark.mpi

CPU = torch.device("cpu")
SIZES = (64, 4096, 300_000)  # the last is beyond the size from which sums are sliced


class Broken:
    """A real communicator whose `method` is changed by `change`; everything else stays its own."""

    def __init__(self, inner: Communicator, method: str, change: Any) -> None:
        self._inner = inner
        setattr(self, method, lambda *arguments: change(getattr(inner, method), *arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def flip_bit(send: Any, tensor: torch.Tensor, destination: int) -> None:
    """Send a message with one bit changed, where it is a long one."""
    if tensor.numel() == 4096:
        tensor = tensor.clone()
        tensor[100] ^= 4
    send(tensor, destination)


def lose_last(reduce: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Sum, but make the last element what no sum of the probe is."""
    reduce(tensor)
    tensor.view(-1)[-1] = -1
    return tensor


@pytest.fixture
def group(world: MPI.Intracomm) -> Iterator[Communicator]:
    communicator = open_communicator(CPU, world, "world")
    yield communicator
    communicator.close()


def test_a_good_group_passes(group: Communicator) -> None:
    assert probe.verify_group(group, SIZES) == []
    timing = probe.measure_all_reduce(group)
    assert timing.latency_s > 0
    assert timing.bytes_per_s > 0


@pytest.mark.mpi(min_size=2)
def test_a_wrong_sum_is_found_where_it_is(group: Communicator) -> None:
    seen: Any = Broken(group, "all_reduce", lose_last) if group.rank == 1 else group
    faults = probe.verify_group(seen, SIZES)
    if group.rank != 1:
        assert faults == []
        return
    assert len(faults) == 2 * len(SIZES)
    assert faults[0] == "all_reduce of 64 bytes (float32): 1 of 16 elements are wrong"


@pytest.mark.mpi(min_size=2)
def test_pairs_exchange_messages_both_ways(group: Communicator) -> None:
    if group.rank > 1:
        return
    peer = 1 - group.rank
    assert probe.verify_pair(group, peer, SIZES) == []
    timing = probe.measure_pair(group, peer)
    assert timing.latency_s > 0
    assert timing.bytes_per_s > 0


@pytest.mark.mpi(min_size=2)
def test_a_changed_message_is_found_by_who_gets_it(group: Communicator) -> None:
    if group.rank > 1:
        return
    seen: Any = Broken(group, "send", flip_bit) if group.rank == 1 else group
    faults = probe.verify_pair(seen, 1 - group.rank, SIZES)
    assert faults == (
        ["message of 4096 bytes: its checksum is wrong: bytes were changed on the way"] if group.rank == 0 else []
    )


@pytest.mark.parametrize("topology", HERE.values(), ids=HERE.keys())
def test_the_groups_of_a_job_are_verified_and_are_of_the_kind_that_was_expected(
    topology: Topology, world: MPI.Intracomm
) -> None:
    groups = open_groups(world, topology, CPU)
    probe.verify_groups(groups, topology, world.rank)
    expected = expect_kinds(topology, nccl=True)
    for name in GROUPS:
        communicator = getattr(groups, name)
        if communicator is not None:
            assert type(communicator).__name__.removesuffix("Communicator").lower() == expected[name]
    groups.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("fault", ["send", "all_reduce"])
def test_a_broken_transport_is_told_at_the_start_of_a_job(world: MPI.Intracomm, fault: str) -> None:
    topology = next(iter(HERE.values()))
    groups = open_groups(world, topology, CPU)
    bad = topology.worker_ranks[-1]
    workers = groups.workers
    if world.rank == bad and workers is not None:
        change = flip_long if fault == "send" else lose_last
        groups = replace(groups, workers=Broken(workers, fault, change))  # type: ignore[arg-type]
    wrong = world.rank == bad if fault == "all_reduce" else world.rank in topology.worker_ranks and world.rank != bad
    if wrong:
        with pytest.raises(CommunicatorError, match=f"what came to rank {world.rank} is wrong"):
            probe.verify_groups(groups, topology, world.rank)
    else:
        probe.verify_groups(groups, topology, world.rank)
    groups.close()


def flip_long(send: Any, tensor: torch.Tensor, destination: int) -> None:
    """Change one bit of the long messages of a start."""
    if tensor.numel() == probe.QUICK_SIZES[-1]:
        tensor = tensor.clone()
        tensor[-1] ^= 1
    send(tensor, destination)


@pytest.fixture
def control(world: MPI.Intracomm) -> Iterator[ControlPlane]:
    plane = ControlPlane(world if world.size > 1 else None, next(iter(HERE.values())))
    yield plane
    plane.close()


@pytest.mark.mpi(min_size=2)
def test_plans_and_reports_come_through(control: ControlPlane) -> None:
    topology = next(iter(HERE.values()))
    if control.rank != 0:
        assert probe.answer_control(control) == []
        return
    for rank in topology.worker_ranks:
        faults, timing = probe.probe_control(control, rank, SIZES, lambda: False)
        assert faults == []
        assert timing.latency_s > 0
        assert timing.bytes_per_s > 0
    probe.end_control(control)


@pytest.mark.mpi(min_size=2)
def test_changed_plans_and_reports_are_found(control: ControlPlane) -> None:
    topology = next(iter(HERE.values()))
    if control.rank != 0:
        changed = Broken(control, "report", change_payload) if control.rank == 1 else control  # type: ignore[arg-type]
        expected = ["plan of 4096 bytes: its checksum is wrong: bytes were changed on the way"]
        assert probe.answer_control(changed) == expected * len(topology.worker_ranks)  # type: ignore[arg-type]
        return
    broken: Any = Broken(control, "publish", change_payload)  # type: ignore[arg-type]
    for rank in topology.worker_ranks:
        faults, _ = probe.probe_control(broken, rank, SIZES, lambda: False)
        wrong = ["report of 4096 bytes: its checksum is wrong: bytes were changed on the way"]
        assert faults == (wrong if rank == 1 else [])
    probe.end_control(control)


def change_payload(send: Any, payload: bytes, *rest: Any) -> None:
    """Change the last byte of messages of about 4096 bytes."""
    if 4096 <= len(payload) < 5000:
        payload = payload[:-1] + bytes([payload[-1] ^ 1])
    send(payload, *rest)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_answer_is_an_error_in_time(control: ControlPlane, world: MPI.Intracomm) -> None:
    if control.rank == 0:
        with pytest.raises(ControlPlaneError, match="rank 1 does not answer"):
            probe.probe_control(control, 1, SIZES, lambda: True)
        probe.end_control(control)
        world.Barrier()
        while control.collect(0.2) is not None:  # answers that came late
            pass
    else:
        if control.rank != 1:
            probe.answer_control(control)
        world.Barrier()
        if control.rank == 1:
            probe.answer_control(control)
