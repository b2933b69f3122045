"""Rank 0's end of the heartbeat: it watches the start and then every round, and finds the rank that fails.

One thread that never touches MPI, except to end the job, so it works while the main thread hangs in a call. It starts
before anything is exchanged and watches the start against a deadline; from then on it watches for ranks that are silent
or stand still, and it hears from workers that have failed. What it finds the main thread takes, to end the job in its
own way; where that does not come to take it, the thread ends the job itself. Who is at fault is decided in
`fault_attribution`; the workers' end is in `heartbeat`.

Where rank 0 has a device it works like the others, and is judged beside them.

Of ranks that the job can do without, such a finding is a loss instead: the main thread can ask for it, all other ranks
are told, and the lost ranks are ended. They are lost together, because they wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from parallel import abort
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Doing
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.fault_attribution import (
    LOST_SECONDS,
    Accusation,
    RankState,
    StacksWanted,
    examine,
    find_broken,
    find_lost,
    late_starters,
)
from parallel.watchdog.handshake import listen
from parallel.watchdog.processes import Stack, main_stack, named, show_stacks

TURNS_IN_HEARTBEAT = 2
PATIENCE_HEARTBEATS = 4
STACK_SECONDS = 2.0
"""How long ranks may take to send their stacks; one that cannot writes its own to stderr (see `dump_seconds`)."""

TAKE_SECONDS = 3.0
"""How long the main thread may take to see a failure before the thread ends the job. A program that has the word
between two calls may take as long as it likes."""

END_SECONDS = 1.0
"""How long a lost rank has to end by itself."""

LEAVING_SECONDS = 10.0
GOODBYE_SECONDS = 1.0
"""How long the end of this process is held up for workers that do not leave."""


def heartbeat_interval(limit: float) -> float:
    """Seconds between two heartbeats, where silence counts after `limit` seconds."""
    return min(1.0, limit / 8)


WRITING_SECONDS = 0.25
"""What C code takes to write a process's stacks, at most."""


def dump_seconds(limit: float) -> float:
    """Seconds without a heartbeat after which C code writes a process's stacks: once its silence is noticed, but before
    the job ends for it."""
    return limit + 0.25 * STACK_SECONDS


@dataclass(frozen=True)
class Failure:
    """What ends a job.

    Attributes:
        line: names the rank and the cause: "target rank 2 (node2 cuda:0) failed: silent for 60 s, last seen …".
        stacks: text of the ranks' stacks, those at fault first; empty where the rank itself told the cause.
    """

    line: str
    stacks: str = ""


@dataclass(frozen=True)
class Loss:
    """Ranks that the job goes on without.

    Attributes:
        ranks: world ranks.
        line: names the one that was lost first, and the cause: "draft rank 1 (cpu:0) is lost: silent for 60 s, …".
    """

    ranks: tuple[int, ...]
    line: str


class HeartbeatServer:
    """The watch over all workers, and over rank 0's own main thread."""

    def __init__(
        self,
        topology: Topology,
        activity: Activity,
        heartbeat_seconds: float,
        start_seconds: float,
        overdue: str,
        expendable: Sequence[int] = (),
        unawaited: Sequence[int] = (),
        still_seconds: float | None = None,
    ) -> None:
        """Begin to watch the start.

        Args:
            topology: who sits where.
            activity: of this process, rank 0.
            heartbeat_seconds: most seconds of silence, once all are up.
            start_seconds: most seconds from now until `finish_start`, or `close`.
            overdue: what a start that takes longer is told with.
            expendable: world ranks that the job can do without once all are up. The first that is lost takes the others
                along.
            unawaited: world ranks without which rounds go on.
            still_seconds: most seconds in which no rank of a round gets on, once all are up; None is
                heartbeat_seconds.
        """
        self._topology = topology
        self._activity = activity
        self._limit = heartbeat_seconds
        self._still_limit = heartbeat_seconds if still_seconds is None else still_seconds
        self._start_seconds = start_seconds
        self._overdue = overdue
        self._interval = heartbeat_interval(heartbeat_seconds)
        self._patience = PATIENCE_HEARTBEATS * self._interval
        # A silent rank has time to write its own stacks.
        self._stack_patience = dump_seconds(self._limit) + WRITING_SECONDS
        self._started = time.monotonic()
        self._is_up = threading.Event()
        self._closing = threading.Event()
        self._said_goodbye = threading.Event()
        self._is_over = threading.Event()
        self._failure: Failure | None = None
        self._is_taken = False
        self._take_due = 0.0
        self._expendable = tuple(expendable)
        self._unawaited = frozenset(unawaited)
        self._works = topology.slot(0) is not None
        self._loss: Loss | None = None
        self._kill_due = float("inf")
        self._workers = WorkerConnections([rank for rank in topology.worker_ranks if rank != 0], activity)
        watch = named(self._watch, f"heartbeat of {topology.describe(0)}")
        threading.Thread(target=abort.ending_on_error(watch), name="heartbeat", daemon=True).start()

    # From the main thread.

    @property
    def token(self) -> str:
        """What workers must know."""
        return self._workers.token

    @property
    def start_seconds_left(self) -> float:
        """Seconds until the deadline of the start."""
        return max(0.0, self._started + self._start_seconds - time.monotonic())

    def listen(self, everywhere: bool) -> int:
        """Accept connections until every worker is there: of this host, or of all hosts. Returns the port."""
        listener = listen(everywhere)
        port = int(listener.getsockname()[1])
        self._workers.add_listener(listener)
        return port

    def finish_start(self) -> None:
        """Every rank is up: the deadline of the start is met, heartbeats count."""
        self._is_up.set()
        self._workers.wake()

    def has_failed(self) -> bool:
        """Whether a failure has been found. Cheap: for those who wait."""
        return self._failure is not None

    @property
    def loss(self) -> Loss | None:
        """The ranks that the job has lost and goes on without; None while all are there. Cheap."""
        return self._loss

    @property
    def lost_are_gone(self) -> bool:
        """Whether the processes of all lost ranks have ended, as far as is known: the end of MPI waits for others."""
        return self._loss is None or self._workers.lost_are_gone

    def look(self) -> dict[int, Doing]:
        """What each rank does, as far as is known: rank 0, and the workers that are not lost. From any thread."""
        told = {state.rank: state.doing for state in self._workers.states()}
        return {0: self._activity.look()} | {rank: doing for rank, doing in told.items() if doing is not None}

    def take_failure(self) -> Failure | None:
        """The failure, if there is one: the caller sees to the end of the job, and the thread does not."""
        self._is_taken = self._failure is not None
        return self._failure

    def close(self) -> None:
        """Watch no longer, tell the workers so, and wait until they have left: the end of MPI lets no thread run.

        After a failure there is nobody to wait for: workers hang where the failed one left them. They hear heartbeats
        as before, and end with this process.
        """
        if self.has_failed():
            return
        self._closing.set()
        self._workers.wake()
        self._said_goodbye.wait(timeout=LEAVING_SECONDS)
        self._is_over.wait(timeout=GOODBYE_SECONDS)

    # The thread.

    def _watch(self) -> None:
        turned, dump_due, was_up = self._started, 0.0, False
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= dump_due:
                abort.write_stacks_after(dump_seconds(self._limit))
                dump_due = now + self._interval
            self._workers.serve(self._turn_seconds())
            now = time.monotonic()
            # Who could not listen must not judge: this process was stopped, or its threads could not run.
            if now - turned > self._patience or self._is_up.is_set() != was_up:
                self._workers.forgive()
                was_up = self._is_up.is_set()
            turned = now
            if self._failure is not None:
                self._await_taking(self._failure)
            elif was_up and self._judge_expendable():
                continue
            elif (told := self._workers.first_failure()) is not None:
                self._find(Failure(f"{self._topology.describe(told[0])} failed: {told[1]}"))
            elif was_up:
                self._judge()
            else:
                self._judge_start()
        self._leave()

    def _turn_seconds(self) -> float:
        """How long to wait for news: a closed connection of an expendable rank is to be judged soon."""
        waits = self._expendable and self._loss is None and self._is_up.is_set()
        if waits and any(state.closed_seconds is not None for state in self._workers.states()):
            return LOST_SECONDS / 4
        return self._interval / TURNS_IN_HEARTBEAT

    def _judge_expendable(self) -> bool:
        """Look after the ranks that the job can do without; returns whether they are lost just now."""
        if self._loss is not None:
            if time.monotonic() >= self._kill_due:
                self._kill_due = float("inf")
                self._workers.kill_lost()
            return False
        told = self._workers.first_failure()
        if told is not None and told[0] in self._expendable:
            found: Accusation | None = Accusation((told[0],), told[1])
        else:
            states = [state for state in self._workers.states() if state.rank in self._expendable]
            found = find_lost(states, self._limit)
        if found is None:
            return False
        self._workers.lose(self._expendable)
        self._kill_due = time.monotonic() + END_SECONDS
        self._loss = Loss(self._expendable, f"{self._topology.describe(found.ranks[0])} is lost: {found.cause}")
        return True

    def _judge_start(self) -> None:
        states = self._workers.states()
        if self.start_seconds_left <= 0:
            late = late_starters(self._activity.look(), states, self._patience)
            places = "; ".join(f"{self._topology.describe(rank)}: {words}" for rank, words in late)
            self._find(Failure(f"{self._overdue}: {places}", self._take_stacks([rank for rank, _ in late])))
        elif broken := find_broken(states):
            self._accuse(broken)

    def _judge(self) -> None:
        finding = self._examine(None)
        if isinstance(finding, StacksWanted):
            self._workers.new_question()
            stacks = self._workers.gather_stacks(STACK_SECONDS, self._stack_patience)
            # Meanwhile the round may have ended, or a rank may have fallen silent.
            finding = self._examine(stacks)
        if isinstance(finding, Accusation):
            self._accuse(finding)

    def _examine(self, stacks: dict[int, Stack] | None) -> Accusation | StacksWanted | None:
        """Judge the ranks that the job cannot do without."""
        needed = [state for state in self._workers.states() if state.rank not in self._expendable]
        own = self._activity.look()
        if self._works:
            needed = [RankState(0, own), *needed]
            stacks = stacks if stacks is None else {0: main_stack(self._activity.thread), **stacks}
        return examine(own, needed, self._limit, self._patience, stacks, self._unawaited, self._still_limit)

    def _accuse(self, accusation: Accusation) -> None:
        rank, *others = accusation.ranks
        line = f"{self._topology.describe(rank)} failed: {accusation.cause}"
        host = self._topology.host(rank)
        if host and {slot.rank for slot in self._topology.slots_of_host(host)} <= set(accusation.ranks):
            line += f"; no rank of {host} answers"
            others = [other for other in others if self._topology.host(other) != host]
        if others:
            line += f"; so for {', '.join(map(self._topology.describe, others))}"
        self._find(Failure(line, self._take_stacks(accusation.ranks)))

    def _take_stacks(self, first: Sequence[int]) -> str:
        """The stacks of all ranks that answer, some of them first."""
        stacks = {0: main_stack(self._activity.thread)}
        stacks |= self._workers.gather_stacks(STACK_SECONDS, self._stack_patience)
        order = sorted(stacks, key=lambda rank: (rank not in first, rank))
        return show_stacks({self._topology.describe(rank): stacks[rank] for rank in order})

    def _find(self, failure: Failure) -> None:
        self._take_due = time.monotonic() + TAKE_SECONDS
        self._failure = failure

    def _await_taking(self, failure: Failure) -> None:
        """End the job where the main thread does not see to it: it hangs, in MPI or elsewhere."""
        doing = self._activity.look()
        if doing.is_idle and not (doing.ticks and doing.still_seconds > self._still_limit):
            self._take_due = time.monotonic() + TAKE_SECONDS
        if not self._is_taken and time.monotonic() > self._take_due:
            abort.begin_ending()
            abort.say(f"trtrun: {failure.line}\n")
            if failure.stacks:
                abort.say(failure.stacks)
            abort.end_world()

    def _leave(self) -> None:
        """Say goodbye, and stay until all are gone: a socket closed with a heartbeat unread would lose the goodbye."""
        abort.cancel_stacks()
        if self._loss is not None:
            self._workers.kill_lost()
        self._workers.say_goodbye()
        self._said_goodbye.set()
        now = time.monotonic()
        deadline, lost_deadline = now + LEAVING_SECONDS, now + GOODBYE_SECONDS / 2
        while (not self._workers.all_are_gone and now < deadline) or (not self.lost_are_gone and now < lost_deadline):
            self._workers.serve(min(self._interval, GOODBYE_SECONDS / 4))
            now = time.monotonic()
        self._workers.close()
        self._is_over.set()
