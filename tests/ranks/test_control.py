"""The control plane between real ranks: order, sizes, start-up exchanges, timeouts, shutdown, quiet waiting."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import pytest
from jobs import SIZE
from mpi4py import MPI
from topologies import HERE

from parallel import control as control_module
from parallel.control import ControlPlane
from parallel.errors import ControlPlaneError, TopologyError
from parallel.topology import Topology
from parallel.waiting import Waiter

pytestmark = pytest.mark.mpi

SIZES = [0, 1, 100, 5_000, 300_000, 0, 7_000_000, 3]


def payload(size: int, salt: int) -> bytes:
    return hashlib.shake_128(f"{size} {salt}".encode()).digest(size)


@pytest.fixture
def topology() -> Topology:
    return next(iter(HERE.values()))


@pytest.fixture
def control(world: MPI.Intracomm, topology: Topology) -> Iterator[ControlPlane]:
    plane = ControlPlane(world if world.size > 1 else None, topology)
    plane.warm_up()
    yield plane
    plane.close()


@pytest.mark.mpi(min_size=2)
def test_plans_of_any_size_reach_every_worker_in_order(control: ControlPlane) -> None:
    if control.rank == 0:
        for index, size in enumerate(SIZES):
            control.publish(payload(size, index))
        control.shut_down()
    else:
        for index, size in enumerate(SIZES):
            assert control.receive() == payload(size, index)
            assert not control.is_shut_down
        assert control.receive() is None
        assert control.is_shut_down


@pytest.mark.mpi(min_size=2)
def test_reports_of_any_size_keep_the_order_of_each_worker(control: ControlPlane, topology: Topology) -> None:
    if control.rank == 0:
        expected = {rank: list(enumerate(SIZES)) for rank in topology.worker_ranks}
        for _ in range(len(SIZES) * len(topology.worker_ranks)):
            report = control.collect()
            assert report is not None
            index, size = expected[report.rank].pop(0)
            assert report.payload == payload(size, 100 * report.rank + index)
            assert report.kind == index % 3
        assert control.collect(timeout=0) is None
    else:
        for index, size in enumerate(SIZES):
            control.report(payload(size, 100 * control.rank + index), kind=index % 3)


@pytest.mark.mpi(min_size=2)
def test_plans_and_reports_alternate_for_many_rounds(control: ControlPlane, topology: Topology) -> None:
    for index in range(200):
        message = index.to_bytes(4, "little")
        if control.rank == 0:
            control.publish(message)
            reports = [control.collect() for _ in topology.worker_ranks]
            assert sorted(report.rank for report in reports if report) == list(topology.worker_ranks)
            assert {report.payload for report in reports if report} == {message}
        else:
            received = control.receive()
            assert received == message
            control.report(received)


@pytest.mark.mpi(min_size=2)
def test_the_orchestrator_does_not_wait_for_workers_to_receive(control: ControlPlane, topology: Topology) -> None:
    plan = bytearray(payload(3_000_000, 0))
    if control.rank == 0:
        for _ in range(4):
            control.publish(plan)
        plan[:] = bytes(len(plan))  # its buffer is its own again
        control.publish(b"go")
        assert {control.collect().rank for _ in topology.worker_ranks} == set(topology.worker_ranks)
    else:
        for _ in range(4):
            assert control.receive() == plan
        assert control.receive() == b"go"
        control.report(b"done")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("may_spin", [False, True])
def test_each_end_learns_how_long_messages_take_but_not_from_start_up(
    world: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch, may_spin: bool
) -> None:
    waits: list[bool] = []

    class Spy(Waiter):
        def __init__(self, may_spin: bool) -> None:
            super().__init__(may_spin)
            self.is_allowed = may_spin

        def wait(self, test: Callable[[], bool], timeout: float | None = None) -> bool:
            waits.append(self.is_allowed)
            return super().wait(test, timeout)

    monkeypatch.setattr(control_module, "Waiter", Spy)
    plane = ControlPlane(world, topology, may_spin)
    plane.warm_up()
    assert not waits
    if plane.rank == 0:
        plane.publish(b"plan")
        assert all(plane.collect() for _ in topology.worker_ranks)
    else:
        plane.receive()
        plane.report(b"report")
    assert waits == [may_spin] * (len(topology.worker_ranks) if plane.rank == 0 else 1)
    plane.close()


@pytest.mark.mpi(min_size=3)
def test_a_forgotten_worker_is_sent_nothing_taken_nothing_from_and_not_waited_for(
    control: ControlPlane, topology: Topology, world: MPI.Intracomm
) -> None:
    lost, large = topology.worker_ranks[-1], payload(8_000_000, 0)
    if control.rank == 0:
        control.publish(large)  # of this the lost rank takes nothing as long as it is waited for
        world.Barrier()
        control.forget([lost])
        control.publish(b"go")
        control.shut_down()
        reports = [control.collect() for _ in topology.worker_ranks[1:]]
        assert lost not in {report.rank for report in reports if report}
        assert control.collect(timeout=0) is None
        world.Barrier()
        world.Barrier()  # MPI reads from what was on its way until the lost rank has it: it must stay until then
        return
    if control.rank == lost:
        control.report(b"before it was forgotten")
        world.Barrier()
        world.Barrier()
        assert control.receive() == large
        assert control.receive(timeout=0.1) is None
        assert not control.is_shut_down
        world.Barrier()
        return
    assert control.receive() == large
    world.Barrier()
    assert control.receive() == b"go"
    assert control.receive() is None
    control.report(b"done")
    world.Barrier()
    world.Barrier()


def test_start_up_values_are_gathered_in_rank_order_and_broadcast(control: ControlPlane, topology: Topology) -> None:
    gathered = control.gather_start({"rank": control.rank, "host": "h" * 20_000})
    if control.rank == 0:
        assert [value["rank"] for value in gathered or []] == list(range(topology.world_size))
    else:
        assert gathered is None
    given = {"num_blocks": 17, "names": ["a", "b"], "nothing": None}
    assert control.broadcast_start(given if control.rank == 0 else None) == given


@pytest.mark.mpi(min_size=2)
def test_waiting_ends_with_none_when_the_time_is_up(control: ControlPlane, world: MPI.Intracomm) -> None:
    assert (control.collect if control.rank == 0 else control.receive)(timeout=0.02) is None
    assert not control.is_shut_down
    world.Barrier()


@pytest.mark.mpi(min_size=2)
def test_each_end_refuses_what_is_the_others(control: ControlPlane) -> None:
    if control.rank == 0:
        with pytest.raises(ControlPlaneError, match="only workers report"):
            control.report(b"")
    else:
        for call in (lambda: control.publish(b""), control.collect, control.shut_down):
            with pytest.raises(ControlPlaneError, match="is the orchestrator's"):
                call()
        with pytest.raises(ControlPlaneError, match="kind 1024"):
            control.report(b"", kind=1024)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_start_is_named(world: MPI.Intracomm, topology: Topology) -> None:
    control = ControlPlane(world, topology)
    late = topology.worker_ranks[-1]
    if control.rank == 0:
        with pytest.raises(ControlPlaneError, match=rf"rank {late} \(.*\) did not start within 0.05 s"):
            control.gather_start({}, timeout=0.05)
    elif control.rank != late:
        control.gather_start({})
    world.Barrier()
    control.close()


def test_a_world_of_another_size_is_refused(world: MPI.Intracomm) -> None:
    other = Topology.from_devices(["cpu:0", "cpu:1", "cpu:2"], ["cpu:3", "cpu:4"])
    with pytest.raises(TopologyError, match="need 6 ranks"):
        ControlPlane(world, other)


@pytest.mark.parametrize("waiting", ["workers", "orchestrator"] if SIZE == 3 else [])  # all wait alike
def test_idle_is_quiet(control: ControlPlane, topology: Topology, waiting: str) -> None:
    waits = (control.rank != 0) == (waiting == "workers")
    if waits:
        wall, processor = time.perf_counter(), time.process_time()
        for _ in topology.worker_ranks if control.rank == 0 else [0]:
            assert (control.collect if control.rank == 0 else control.receive)() is not None
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        assert wall > 0.5
        assert processor / wall < 0.3
    else:
        time.sleep(1.0)  # the work that the others wait for
        (control.publish if control.rank == 0 else control.report)(b"x")
