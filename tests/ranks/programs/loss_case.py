"""A job whose draft ranks may be lost, without models: an orchestrator, draft ranks, and two target ranks at the end.

LOSS_DRAFTS: number of draft ranks. LOSS_ROUNDS: rounds behind the loss, or in all where LOSS_EXPECTED is 0.
LOSS_LIMIT: seconds of the heartbeat. LOSS_TELL: the round in which rank 0 says that it runs. LOSS_KIND: what goes wrong
by itself in the first draft rank, or for the last in the first target rank:

- none: nothing.
- raises: an exception after LOSS_TELL rounds.
- starts: it does not join the heartbeat, and waits to be killed.
- elsewhere: nothing, but it gives itself out for a process of another host.
- lingers: it does not end when the job does.
- exits: the target rank exits with status 3 after LOSS_TELL rounds.

Every round rank 0 sends a plan; target ranks sum, look for the draft's packet, and their leader reports; the draft
ranks sum and send a packet. Rank 0 prints what it saw at the end.
"""

from __future__ import annotations

import os
import signal
import time

import numpy
from mpi4py import MPI

import parallel.watchdog.heartbeat
from launch.jobs.mpi.start_progress import DONE, StartProgress
from parallel import abort
from parallel.control import ControlPlane
from parallel.mpi_rank import is_lost_peer, outlives_ranks
from parallel.topology import Topology
from parallel.waiting import wait_until
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.heartbeat import HeartbeatClient, invite_workers, join_heartbeat
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.rounds.failures import RankFailures

DRAFTS = int(os.environ.get("LOSS_DRAFTS", "1"))
ROUNDS = int(os.environ.get("LOSS_ROUNDS", "200"))
EXPECTED = int(os.environ.get("LOSS_EXPECTED", "1"))
LIMIT = float(os.environ.get("LOSS_LIMIT", "60"))
TELL = int(os.environ.get("LOSS_TELL", "100"))
KIND = os.environ.get("LOSS_KIND", "none")
PACKET_SECONDS = 0.002
TAG = 7

WORLD = MPI.COMM_WORLD
TOPOLOGY = Topology.from_devices([f"cpu:{index}" for index in range(DRAFTS)], [f"cpu:{DRAFTS}", f"cpu:{DRAFTS + 1}"])
ROLE = "orchestrator" if WORLD.rank == 0 else "draft" if WORLD.rank in TOPOLOGY.draft_ranks else "target"


def orchestrate(control: ControlPlane, failures: RankFailures, activity: Activity) -> None:
    """Rank 0: rounds until enough of them ran without the draft."""
    number, left, longest, drafted = 0, ROUNDS, 0.0, 0
    reported, is_told = time.monotonic(), False
    while left:
        number += 1
        activity.enter(number, Phase.AWAITING_REPORT)
        failures.check()
        control.publish(number.to_bytes(4, "little"))
        report = failures.collect(control)
        while int.from_bytes(report.payload[:4], "little") != number:
            report = failures.collect(control)
        now = time.monotonic()
        longest, reported = max(longest, now - reported), now
        drafted += report.payload[4]
        left -= not EXPECTED or bool(failures.lost_ranks)
        # Nobody waits for drafts, so that the first may come late.
        if not is_told and number >= TELL and (drafted or not EXPECTED):
            print("running", flush=True)
            is_told = True
    activity.rest()
    print(f"lost {sorted(failures.lost_ranks)} drafted {drafted} longest {longest:.3f}", flush=True)
    failures.close(control)
    print("all is well", flush=True)


def verify(control: ControlPlane, heartbeat: HeartbeatClient, activity: Activity, group: MPI.Intracomm) -> None:
    """A target rank: a sum in every round, and the draft's packet if it comes soon."""
    sums, own = numpy.zeros(1024), numpy.ones(1024)
    while (plan := control.receive()) is not None:
        number = int.from_bytes(plan, "little")
        activity.enter(number, Phase.VERIFYING)
        if KIND == "exits" and group.rank == 0 and number > TELL:
            os._exit(3)
        for _ in range(4):
            group.Allreduce(own, sums)
            assert sums[0] == group.size
        found = [False]

        def look(number: int = number, found: list[bool] = found) -> bool:
            if heartbeat.lost_ranks:
                return True
            try:
                message = PACKETS.Improbe(TOPOLOGY.draft_leader, TAG)
            except MPI.Exception as error:
                assert is_lost_peer(error)
                return True
            if message is not None:
                buffer = bytearray(4)
                message.Recv(buffer)
                found[0] = int.from_bytes(buffer, "little") == number
            return found[0]

        wait_until(look, PACKET_SECONDS)
        if group.rank == 0:
            control.report(plan + bytes([found[0]]))
        activity.rest()


def draft(control: ControlPlane, activity: Activity, group: MPI.Intracomm) -> None:
    """A draft rank: a sum in every round, and a packet to each target rank."""
    sums, own = numpy.zeros(1024), numpy.ones(1024)
    sending: list[MPI.Request] = []
    while (plan := control.receive()) is not None:
        activity.enter(int.from_bytes(plan, "little"), Phase.DRAFTING)
        if KIND == "raises" and group.rank == 0 and int.from_bytes(plan, "little") > TELL:
            raise ValueError("the draft's device is on fire")
        for _ in range(4):
            group.Allreduce(own, sums)
        if group.rank == 0:
            sending += [PACKETS.Isend(plan, rank, TAG) for rank in TOPOLOGY.target_ranks]
            sending = [request for request in sending if not request.Test()]
        activity.rest()


def work(control: ControlPlane, expendable: tuple[int, ...]) -> None:
    """A rank with a device, to the end."""
    activity = Activity()
    if WORLD.rank == TOPOLOGY.draft_leader and KIND == "starts":
        signal.pause()
    if WORLD.rank == TOPOLOGY.draft_leader and KIND == "elsewhere":
        parallel.watchdog.heartbeat.own_process = lambda: {"place": "another host", "number": os.getpid()}
    heartbeat = join_heartbeat(control, TOPOLOGY, activity, LIMIT, expendable)
    group = WORLD.Split(TOPOLOGY.draft_ranks.count(WORLD.rank), WORLD.rank)
    try:
        if ROLE == "draft":
            draft(control, activity, group)
        else:
            verify(control, heartbeat, activity, group)
    except Exception as error:
        heartbeat.fail(f"{type(error).__name__}: {error}", grace=10.0 if is_lost_peer(error) else 0.0)
        raise
    heartbeat.close()
    if ROLE == "draft" and KIND == "lingers":
        signal.pause()


def main() -> None:
    """This rank's whole life."""
    expendable = TOPOLOGY.draft_ranks if outlives_ranks() else ()
    if expendable:
        abort.leave_at_exit()
    if ROLE != "orchestrator":
        work(ControlPlane(WORLD, TOPOLOGY), expendable)
        return
    abort.stand_by()
    activity = Activity()
    heartbeat = HeartbeatServer(TOPOLOGY, activity, LIMIT, 60.0, "the start is late", expendable)
    control = ControlPlane(WORLD, TOPOLOGY)
    invite_workers(control, TOPOLOGY, heartbeat)
    WORLD.Split(MPI.UNDEFINED, 0)
    heartbeat.finish_start()
    StartProgress().tell_expendable(expendable)
    orchestrate(control, RankFailures(heartbeat, control), activity)


PIDS = WORLD.allgather(os.getpid())
if WORLD.rank == 0:
    print("pids", *PIDS, flush=True)
PACKETS = WORLD.Dup()
StartProgress().tell(DONE, "the start")
main()
