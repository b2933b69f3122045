"""The control plane: plans from the orchestrator to every worker, reports back, start-up exchanges, and the way out.

It carries bytes on the host, over MPI, and never looks inside a plan or a report. Sending never blocks: buffers are
kept until MPI has sent them. Waiting spins for as long as a message usually takes, where it may, and then sleeps
(`parallel.waiting`). In a job of one process the same calls go through queues, and MPI is not started.

Where MPI outlives its ranks (`parallel.mpi_rank`), a rank that is gone is one whose messages do not come: the
heartbeat says who it is, and `forget` leaves it out from then on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from parallel import abort
from parallel.errors import ControlPlaneError
from parallel.messages import LocalMessages, MpiMessages
from parallel.topology import Topology
from parallel.waiting import Waiter, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_PLAN = 1
TAG_SHUTDOWN = 2
TAG_START = 3
# A report of kind k has tag TAG_REPORT + k.
TAG_REPORT = 16
MOST_KINDS = 1024

Payload = bytes | bytearray | memoryview


class Report(NamedTuple):
    """What a worker told the orchestrator: its world rank, the bytes, and the kind that the worker gave them."""

    rank: int
    payload: bytes
    kind: int


class ControlPlane:
    """One end of the control plane; every rank of the world makes one, from the same topology.

    Messages between two ranks keep their order. Attributes:
        rank: this process's world rank.
        is_shut_down: at a worker, whether the orchestrator has ended the job.
    """

    def __init__(self, world_comm: MPI.Intracomm | None, topology: Topology, may_spin: bool = False) -> None:
        """Join the control plane. Collective.

        Args:
            world_comm: all ranks of the job; duplicated, so that its tags are free for others. None for one process.
            topology: who sits where.
            may_spin: whether this rank has a core to itself while it waits for a plan or a report (see Waiter).

        Raises:
            TopologyError: the world has another size than the topology.
        """
        topology.check_world(world_comm.Get_size() if world_comm else 1)
        self.rank = world_comm.Get_rank() if world_comm else 0
        self.is_shut_down = False
        self._topology = topology
        # Plans at a worker, reports at the orchestrator; start-up teaches it nothing.
        self._waiter = Waiter(may_spin)
        self._workers = topology.worker_ranks
        self._transport: MpiMessages | LocalMessages
        self._transport = MpiMessages(world_comm.Dup()) if world_comm else LocalMessages(TAG_REPORT)

    @property
    def num_workers(self) -> int:
        """How many ranks take plans."""
        return len(self._workers)

    # Plans: orchestrator → workers.

    def publish(self, payload: Payload) -> None:
        """Send a plan to every worker, without waiting. At the orchestrator.

        Args:
            payload: any number of bytes; copied unless it is `bytes`, so that the caller may reuse its buffer.
        """
        self._only_orchestrator("publish")
        kept = bytes(payload)
        for rank in self._workers:
            self._transport.send(rank, TAG_PLAN, kept)

    def receive(self, timeout: float | None = None, until: Callable[[], bool] | None = None) -> bytes | None:
        """Wait for the next plan; asleep once that takes longer than usual. At a worker.

        Args:
            timeout: seconds; None waits for ever.
            until: ends the wait when it returns true; asked as often as for a plan.

        Returns:
            The plan; None when the timeout passed or `until` ended the wait, or when the orchestrator shut the job down
            (`is_shut_down`).
        """
        if self.is_shut_down:
            return None
        message = self._transport.take(
            self._topology.orchestrator_rank, (TAG_PLAN, TAG_SHUTDOWN), timeout, self._waiter.wait, until
        )
        if message is None:
            return None
        if message.tag not in (TAG_PLAN, TAG_SHUTDOWN):
            raise ControlPlaneError(f"rank {self.rank} waits for a plan, but the orchestrator is still starting")
        self.is_shut_down = message.tag == TAG_SHUTDOWN
        return None if self.is_shut_down else message.payload

    def shut_down(self, until: Callable[[], bool] | None = None) -> None:
        """Tell every worker that no plan will follow, and wait until all messages are sent. At the orchestrator.

        Args:
            until: ends the wait when it returns true, as where a worker takes no messages any more.
        """
        self._only_orchestrator("shut_down")
        for rank in self._workers:
            self._transport.send(rank, TAG_SHUTDOWN, b"")
        self._transport.flush(until)

    def forget(self, ranks: Iterable[int]) -> None:
        """Go on without some workers, which are lost: nothing is sent to them, taken from them or waited for.

        Args:
            ranks: world ranks of workers; those that are forgotten already stay so.
        """
        lost = frozenset(ranks)
        self._workers = tuple(rank for rank in self._workers if rank not in lost)
        self._transport.forget(lost)

    # Reports: workers → orchestrator.

    def report(self, payload: Payload, kind: int = 0) -> None:
        """Send a report to the orchestrator, without waiting. At a worker.

        Args:
            payload: any number of bytes; copied unless it is `bytes`.
            kind: 0 to 1023, handed to whoever collects.
        """
        if self.rank not in self._topology.worker_ranks:
            raise ControlPlaneError(f"rank {self.rank} is not a worker: only workers report")
        if not 0 <= kind < MOST_KINDS:
            raise ControlPlaneError(f"kind {kind} of a report is not between 0 and {MOST_KINDS - 1}")
        self._transport.send(self._topology.orchestrator_rank, TAG_REPORT + kind, bytes(payload))

    def collect(self, timeout: float | None = None, until: Callable[[], bool] | None = None) -> Report | None:
        """Wait for any worker's next report; asleep once that takes longer than usual. At the orchestrator.

        Args:
            timeout: seconds; None waits for ever.
            until: ends the wait when it returns true; asked as often as for a report.

        Returns:
            The report; None when the timeout passed, or `until` ended the wait.
        """
        self._only_orchestrator("collect")
        message = self._transport.take(None, None, timeout, self._waiter.wait, until)
        if message is None:
            return None
        if message.tag < TAG_REPORT:
            raise ControlPlaneError(f"rank {message.source} is still starting: gather_start comes before collect")
        return Report(message.source, message.payload, message.tag - TAG_REPORT)

    # Start-up.

    def gather_start(self, value: dict[str, Any], timeout: float | None = None) -> list[dict[str, Any]] | None:
        """Gather one small dict of each rank at rank 0, in rank order. Collective; rank 0 waits asleep.

        Args:
            value: what JSON can hold.
            timeout: seconds that rank 0 waits for each rank; None waits for ever.

        Returns:
            At rank 0 every rank's value, None elsewhere.

        Raises:
            ControlPlaneError: at rank 0, a rank that did not answer in time.
        """
        if self.rank != 0:
            self._transport.send(0, TAG_START, json.dumps(value).encode())
            return None
        values = [json.loads(json.dumps(value))]
        for rank in range(1, self._topology.world_size):
            message = self._transport.take(rank, (TAG_START,), timeout, wait_until)
            if message is None:
                raise ControlPlaneError(f"{self._topology.describe(rank)} did not start within {timeout} s")
            values.append(json.loads(message.payload))
        return values

    def broadcast_start(self, value: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return rank 0's `value` (a small dict that JSON can hold) on every rank. Collective; waiting ranks sleep."""
        if self.rank != 0:
            message = self._transport.take(0, (TAG_START,), None, wait_until)
            assert message is not None  # without a timeout take() returns only with a message
            return dict(json.loads(message.payload))
        payload = json.dumps(value).encode()
        for rank in range(1, self._topology.world_size):
            self._transport.send(rank, TAG_START, payload)
        return dict(json.loads(payload))

    def warm_up(self) -> None:
        """Exchange a message between rank 0 and every other, so that no connection is made under load. Collective."""
        self.gather_start({})
        self.broadcast_start({})

    # The way out.

    def close(self) -> None:
        """Wait until this rank's messages are sent, then free the communicator. Collective."""
        self._transport.flush()
        self._transport.close()

    def abort(self, cause: str) -> NoReturn:
        """End the whole job now: print one line that names this rank and `cause` on stderr, and exit non-zero.

        Under MPI every rank ends, whatever it is doing, and this one within seconds even where MPI's abort hangs; a job
        of one process exits with status 1.
        """
        self._transport.begin_abort()
        abort.say(f"trtrun: {self._topology.describe(self.rank)} failed: {' '.join(cause.split())}\n")
        self._transport.abort()

    def _only_orchestrator(self, what: str) -> None:
        if self.rank != self._topology.orchestrator_rank:
            raise ControlPlaneError(f"{what} is the orchestrator's: rank {self.rank} called it")
