"""The heartbeat between rank 0 and the workers: TCP beside MPI, so that it goes on while MPI calls hang.

A worker's thread sends a heartbeat about once a second with what the worker's main thread does, and rank 0 answers
each; a worker that fails says so in a heartbeat, with the cause. The worker ends itself when rank 0 is silent or gone;
rank 0 (`heartbeat_server`) lets the job fail when a worker is. Where a process's threads cannot run at all, because a
native call keeps the interpreter's lock, a timer of C code writes its stacks to stderr. It knows ranks, hosts and
phases; it does not know what rounds are for.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from parallel import abort
from parallel.control import ControlPlane
from parallel.errors import HeartbeatError
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Doing
from parallel.watchdog.fault_attribution import CLOSED_SECONDS
from parallel.watchdog.handshake import connect, own_addresses, own_loopback
from parallel.watchdog.heartbeat_server import PATIENCE_HEARTBEATS, HeartbeatServer, dump_seconds, heartbeat_interval
from parallel.watchdog.message_socket import MessageSocket, wait_for
from parallel.watchdog.processes import main_stack, named, own_process

logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())

LAST_WORD_SECONDS = 5.0
"""How long workers wait before they say what another rank most likely says too, in a job that is being ended."""

LONGEST_CAUSE = 10_000
"""Characters of a failure's cause."""

LISTEN_SECONDS = 1.0
"""How much longer rank 0 may be silent than a worker, so that its stacks are written before its workers end the job."""


@dataclass(frozen=True)
class Names:
    """How messages of one worker name it and rank 0.

    Attributes:
        own, orchestrator: as in "draft rank 1 (cpu:0)".
        rank: the worker's own.
        is_expendable: whether the job goes on without it.
    """

    own: str
    orchestrator: str
    rank: int = -1
    is_expendable: bool = False


def invite_workers(control: ControlPlane, topology: Topology, server: HeartbeatServer) -> None:
    """Listen, and tell the workers where. On rank 0, while the workers `join_heartbeat`.

    The token travels by MPI, as everything that this job trusts does.
    """
    own_host = os.uname().nodename
    gathered = control.gather_start({"host": own_host})
    assert gathered is not None
    hosts = [str(value["host"]) for value in gathered]
    everywhere = len(set(hosts)) > 1 or len(topology.hosts) > 1
    names = [name for name in (topology.host(0), own_host) if name]
    addresses = list(dict.fromkeys([*own_addresses(), *names])) if everywhere else [own_loopback()]
    port = server.listen(everywhere)
    logger.info("the heartbeat listens on port %d of %s", port, ", ".join(addresses))
    control.broadcast_start(
        {
            "hosts": hosts,
            "addresses": addresses,
            "port": port,
            "token": server.token,
            "start_seconds": server.start_seconds_left,
        }
    )


def join_heartbeat(
    control: ControlPlane,
    topology: Topology,
    activity: Activity,
    heartbeat_seconds: float,
    expendable: Collection[int] = (),
) -> HeartbeatClient:
    """Connect to rank 0. On every worker, while rank 0 invites them.

    Args:
        control: what tells where rank 0 listens, and the token.
        topology: who sits where.
        activity: of this process.
        heartbeat_seconds: most seconds of silence.
        expendable: world ranks that the job goes on without; the same as rank 0's server has.

    Raises:
        HeartbeatError: rank 0 cannot be reached; the message names both hosts.
    """
    own_host = os.uname().nodename
    control.gather_start({"host": own_host})
    access = control.broadcast_start()
    try:
        introduction = {"rank": control.rank, "process": own_process()}
        messages = connect(access["addresses"], int(access["port"]), str(access["token"]), introduction)
    except HeartbeatError as error:
        if own_host in access["hosts"][1 : control.rank]:
            time.sleep(LAST_WORD_SECONDS)  # a rank of this host that comes first says the same
        raise HeartbeatError(
            f"host {own_host} has no TCP connection to rank 0 on host {access['hosts'][0]} ({error}); "
            f"a firewall between the two must let TCP connections through"
        ) from None
    rank = control.rank
    names = Names(topology.describe(rank), topology.describe(0), rank, rank in expendable)
    # One that may be lost is no witness of the end of rank 0.
    witnesses = [rank for rank in topology.worker_ranks if rank != 0 and rank not in expendable]
    leads = rank == min(witnesses, default=rank)
    return HeartbeatClient(messages, activity, heartbeat_seconds, names, leads, float(access["start_seconds"]))


class HeartbeatClient:
    """A worker's end: a thread that sends heartbeats, listens for rank 0, and ends this process when rank 0 is gone."""

    def __init__(
        self,
        messages: MessageSocket,
        activity: Activity,
        limit: float,
        names: Names,
        speaks_first: bool,
        start_seconds: float,
    ) -> None:
        """Begin to send heartbeats.

        Args:
            messages: connected to rank 0.
            activity: of this process.
            limit: most seconds that rank 0 may be silent.
            names: for messages.
            speaks_first: whether this worker says at once that rank 0 is silent; the others give it time to.
            start_seconds: from now until the deadline of the start, before which long native calls are no news.
        """
        self._messages = messages
        self._activity = activity
        self._limit = limit
        self._names = names
        self._speaks_first = speaks_first
        self._start_deadline = time.monotonic() + start_seconds
        self._interval = heartbeat_interval(limit)
        self._orchestrator = Doing()
        self._failure: str | None = None
        self._lost_ranks: frozenset[int] = frozenset()
        self._closing = threading.Event()
        self._waker, self._wakes = socket.socketpair()
        loop = named(self._run, f"heartbeat of {names.own}")
        self._thread = threading.Thread(target=abort.ending_on_error(loop), name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def lost_ranks(self) -> frozenset[int]:
        """World ranks that the job has lost and goes on without, as rank 0 told. For those who wait for them: cheap."""
        return self._lost_ranks

    def send_now(self) -> None:
        """Tell rank 0 now, not with the next heartbeat, what the main thread does."""
        with suppress(OSError):
            self._waker.send(b"x")

    def fail(self, cause: str, grace: float = 0.0) -> None:
        """Tell rank 0 that this rank has failed, and wait, asleep, for the end.

        Args:
            cause: one line.
            grace: seconds in which the end may come without a word, because another rank is at fault.

        Rank 0 ends this process when its own program is over; where rank 0 is gone, the thread does. Returns only where
        rank 0 lets its workers go all the same.
        """
        self._thread.join(timeout=grace)
        self._failure = cause[:LONGEST_CAUSE]
        self.send_now()
        self._thread.join()

    def close(self) -> None:
        """Say goodbye to rank 0 and stop beating."""
        self._closing.set()
        self.send_now()
        self._thread.join(timeout=LAST_WORD_SECONDS)

    def _run(self) -> None:
        now = heard = turned = heartbeat_due = time.monotonic()
        is_released = False
        while not (is_released or self._closing.is_set()):
            if now >= heartbeat_due:
                self._write_stacks_if_stuck(now)
                failure = {} if self._failure is None else {"failed": self._failure}
                self._messages.send({"doing": self._activity.look().as_dict(), **failure})
                heartbeat_due = now + self._interval
            ends: list[MessageSocket | socket.socket] = [self._wakes]
            if not self._messages.is_closed:
                ends.append(self._messages)
            ready = wait_for(ends, heartbeat_due - time.monotonic())
            now = time.monotonic()
            if self._wakes.fileno() in ready:
                self._wakes.recv(4096)
                heartbeat_due = now
            if not self._messages.is_closed:
                self._messages.flush()
                for message in self._messages.receive():
                    heard = now
                    is_released = self._answer(message) or is_released
            if now - turned > PATIENCE_HEARTBEATS * self._interval:
                heard = now  # this process was stopped, or its threads could not run: that is no news of rank 0
            turned = now
            if not (is_released or self._closing.is_set()):
                self._judge(now - heard)
        self._leave()

    def _answer(self, message: dict[str, Any]) -> bool:
        """Take in a message of rank 0; returns whether it was the last."""
        if "question" in message:
            stack = main_stack(self._activity.thread)
            logger.warning("rank 0 asks where this rank is:\n%s", stack.text, extra={"file_only": True})
            self._messages.send({"stack": stack.text, "waits": stack.waits, "question": message["question"]})
        elif "doing" in message:
            with suppress(TypeError, ValueError):
                self._orchestrator = Doing.from_dict(message["doing"])
        elif "lost" in message:
            self._lost_ranks = frozenset(message["lost"])
            if self._names.rank in self._lost_ranks:
                self._end_in_silence("rank 0 has given this rank up, and goes on without it")
        return "goodbye" in message

    def _judge(self, silent_seconds: float) -> None:
        """End this process when rank 0 is gone, or silent for too long."""
        grace = 0.0 if self._speaks_first else LAST_WORD_SECONDS
        if self._messages.is_closed:
            # Where rank 0 was killed, MPI's launcher ends this process meanwhile, and says why.
            if silent_seconds > CLOSED_SECONDS + grace:
                self._end("its connection broke")
        elif silent_seconds > self._limit + LISTEN_SECONDS + grace:
            self._end(f"silent for {self._limit:g} s")

    def _end(self, cause: str) -> NoReturn:
        """Name rank 0 and end this process; its launcher ends the others. MPI's own abort may need rank 0's host."""
        if self._names.is_expendable:
            self._end_in_silence(f"rank 0: {cause}")
        abort.begin_ending()
        seen = f"last seen {self._orchestrator.words}, as told by {self._names.own}"
        abort.say(f"trtrun: {self._names.orchestrator} failed: {cause}, {seen}\n")
        os._exit(abort.STATUS)

    def _end_in_silence(self, cause: str) -> NoReturn:
        """End this process alone. With any other status its launcher would take that for the job's."""
        logger.warning("this rank ends: %s", cause, extra={"file_only": True})
        os._exit(0)

    def _write_stacks_if_stuck(self, now: float) -> None:
        seconds = dump_seconds(self._limit)
        if self._activity.look().phase.is_start:
            # Loading may be long in native code. Only a start that is late is news.
            seconds = max(seconds, self._start_deadline - now + dump_seconds(0.0))
        abort.write_stacks_after(seconds)

    def _leave(self) -> None:
        abort.cancel_stacks()
        self._messages.send({"goodbye": True})
        self._messages.finish(seconds=1.0)
        self._wakes.close()
        self._waker.close()
