"""Which rank holds a job up: decided from what is known of each, as pure functions, for all who watch ranks.

There are three views of a job. The parent of mpirun sees how far each rank has come before MPI connects it to anything
(`find_stuck`); rank 0 sees the check and the start (`late_starters`), and then every round (`examine`).

Ranks of one job wait for each other, so one that hangs makes all others stand still. As long as one of them gets on,
the round is slow and not stuck: they are judged together, by the time since any of them last got on. A rank that does
not answer comes before one that answers; among those that answer, one that waits for another rank is not at fault as
long as one is found that does not. Ranks for which no other waits are judged apart. A rank 0 that works like the
others, as in a training run, is judged beside them. It knows no socket, no process and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parallel.watchdog.activity import Doing, Phase
from parallel.watchdog.processes import Stack

CLOSED_SECONDS = 5.0
"""How long a connection may be gone before it counts: MPI's launcher is quicker in naming a rank that was killed."""


LOST_SECONDS = 0.2
"""How long the connection of a rank that the job can do without may be gone before it counts: no launcher names that
rank. A job that is being ended as a whole, its ranks one after the other, takes no longer, so that the first of them is
no news."""


SILENT_SECONDS = 3.0
"""How long a rank that tells its progress twice a second may be silent on its way to work."""

FIRST_STEP = 0
"""What every rank does first. MPI lets no thread run meanwhile: all ranks are silent in it, not only the stuck one."""


@dataclass(frozen=True)
class RankState:
    """What rank 0's process knows of one rank: of a worker, or of itself where it works as well.

    Attributes:
        rank: its world rank.
        doing: from its last heartbeat; None when it was never heard of.
        silent_seconds: since its last heartbeat.
        closed_seconds: since its connection was closed without a goodbye; None while it is open.
        has_left: it has said goodbye.
    """

    rank: int
    doing: Doing | None
    silent_seconds: float = 0.0
    closed_seconds: float | None = None
    has_left: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a rank has come on its way to work, as its launcher sees it.

    Attributes:
        step: grows from step to step; FIRST_STEP is the start of MPI.
        silent_seconds: since it was last heard of.
        is_done: whether it has no more to tell.
        is_stopped: whether its process is stopped, as by SIGSTOP or a debugger.
    """

    step: int
    silent_seconds: float = 0.0
    is_done: bool = False
    is_stopped: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether it is stopped, or inside a call that lets no thread run."""
        return self.silent_seconds > SILENT_SECONDS


@dataclass(frozen=True)
class Accusation:
    """Who is at fault, the first of them to be named, and what it did."""

    ranks: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class StacksWanted:
    """A round stands still, but only the ranks' stacks can tell which one holds up the others."""


def examine(
    own: Doing,
    states: Sequence[RankState],
    limit: float,
    patience: float,
    stacks: Mapping[int, Stack] | None = None,
    unawaited: Collection[int] = (),
    still_limit: float | None = None,
) -> Accusation | StacksWanted | None:
    """Judge a running job.

    Args:
        own: what rank 0 does.
        states: of all workers; of rank 0, too, where it works like them.
        limit: seconds that a rank may be silent.
        patience: seconds of silence, some heartbeats long, after which a rank may turn out to be silent.
        stacks: of the ranks that answered, where they were asked; else None.
        unawaited: ranks without which rounds go on, so that one may stand still beside them.
        still_limit: seconds that all ranks in a round may stand still; None is `limit`.

    Returns:
        None while all is well, or may yet turn out to be.
    """
    still_limit = limit if still_limit is None else still_limit
    present = [state for state in states if not state.has_left]
    if broken := find_broken(present):
        return broken
    if silent := [s for s in present if s.closed_seconds is None and s.silent_seconds > limit]:
        seen = silent[0].doing
        is_elsewhere = seen is not None and seen.round_index != own.round_index
        job = f"; the job is in {own.phase.whole} {own.round_index}" if is_elsewhere else ""
        return Accusation(tuple(s.rank for s in silent), f"silent for {limit:g} s, {_last_seen(silent[0])}{job}")
    if own.phase is Phase.SCHEDULING and own.phase_seconds > still_limit:
        return Accusation((0,), f"stands still {own.words} for longer than {still_limit:g} s")
    if outside := _find_outside_rounds([RankState(0, own), *present], still_limit):
        return outside
    busy = [state for state in present if state.doing is not None and state.doing.phase.is_in_round]
    stands_still = bool(busy) and all(s.doing is not None and s.doing.still_seconds > still_limit for s in busy)
    if not stands_still:
        busy = [s for s in busy if s.rank in unawaited and s.doing is not None and _stands_still(s.doing, still_limit)]
        stands_still = bool(busy)
    is_lost = not stands_still and _all_wait(own, present, still_limit)
    if not stands_still and not is_lost:
        return None
    if any(state.silent_seconds > patience or state.closed_seconds is not None for state in present):
        return None  # the others may be waiting for that one: its time will be up soon, or it will answer
    if is_lost:
        return _find_lost_message(own, present, still_limit)
    return StacksWanted() if stacks is None else _find_late(own, present, busy, still_limit, stacks)


def _find_outside_rounds(states: Sequence[RankState], limit: float) -> Accusation | None:
    """Accuse the first rank that stands still in what no other rank waits for within a round: between rounds, or in
    another thread beside them, which has a limit of its own."""
    for state in states:
        if state.doing is None:
            continue
        for work in state.doing.beside:
            if work.still_seconds > work.limit:
                return Accusation((state.rank,), f"stands still in {work.words} for longer than {work.limit:g} s")
        is_outside = state.doing.must_get_on and not state.doing.phase.is_in_round
        if is_outside and state.doing.still_seconds > limit:
            return Accusation((state.rank,), f"stands still {state.doing.words} for longer than {limit:g} s")
    return None


def find_lost(states: Sequence[RankState], limit: float) -> Accusation | None:
    """Accuse the first of the ranks that the job can do without to be lost.

    Nobody waits for them, so each is judged by itself.

    Args:
        states: of these ranks alone.
        limit: seconds that one may be silent, or stand still in a round. One that waits for a verdict does not.

    Returns:
        None while none is lost.
    """
    for state in states:
        if state.has_left:
            continue
        if state.closed_seconds is not None:
            if state.closed_seconds > LOST_SECONDS:
                return Accusation((state.rank,), f"its connection broke, {_last_seen(state)}")
        elif state.silent_seconds > limit:
            return Accusation((state.rank,), f"silent for {limit:g} s, {_last_seen(state)}")
        elif state.doing is not None and _stands_still(state.doing, limit):
            return Accusation((state.rank,), f"stands still {state.doing.words} for longer than {limit:g} s")
    return None


def _stands_still(doing: Doing, limit: float) -> bool:
    works = doing.phase.is_in_round and doing.phase is not Phase.AWAITING_VERDICT
    return works and doing.still_seconds > limit


def find_broken(states: Sequence[RankState]) -> Accusation | None:
    """Accuse the ranks whose connections broke, at any time of a job."""
    broken = [
        s for s in states if not s.has_left and s.closed_seconds is not None and s.closed_seconds > CLOSED_SECONDS
    ]
    if not broken:
        return None
    return Accusation(tuple(s.rank for s in broken), f"its connection broke, {_last_seen(broken[0])}")


def _find_late(
    own: Doing, present: Sequence[RankState], busy: Sequence[RankState], limit: float, stacks: Mapping[int, Stack]
) -> Accusation:
    """Accuse the rank that the others of a round that stands still wait for."""

    def standing(state: RankState) -> tuple[bool, int, int, int]:
        assert state.doing is not None
        waits = state.rank in stacks and stacks[state.rank].waits
        return waits, state.doing.round_index, state.doing.phase.order, state.rank

    first = min(busy, key=standing)
    assert first.doing is not None
    if standing(first)[0]:
        # Everybody in a round waits. One that never got the plan looks idle, and stands a round behind.
        behind = [s for s in present if s.doing and s.doing.is_idle and s.doing.round_index < first.doing.round_index]
        if behind and own.round_index >= first.doing.round_index:
            return _plan_lost(behind, first.doing.round_index)
    note = "; every rank waits for another" if standing(first)[0] else ""
    return Accusation((first.rank,), f"stands still {first.doing.words} for longer than {limit:g} s{note}")


def _all_wait(own: Doing, present: Sequence[RankState], limit: float) -> bool:
    """Whether the orchestrator waits for a report that no worker, all of them idle, is about to make."""
    waits = own.phase is Phase.AWAITING_REPORT and own.phase_seconds > limit
    return waits and all(s.doing is not None and s.doing.is_idle and s.doing.phase_seconds > limit for s in present)


def _find_lost_message(own: Doing, present: Sequence[RankState], limit: float) -> Accusation:
    behind = [s for s in present if s.doing is not None and s.doing.round_index < own.round_index]
    if behind:
        return _plan_lost(behind, own.round_index)
    return Accusation((0,), f"{own.words} for longer than {limit:g} s, although every engine rank is done with it")


def _plan_lost(behind: Sequence[RankState], round_index: int) -> Accusation:
    cause = f"never got the plan of round {round_index}, {_last_seen(behind[0])}"
    return Accusation(tuple(s.rank for s in behind), cause)


def _last_seen(state: RankState) -> str:
    return "never heard of" if state.doing is None else f"last seen {state.doing.words}"


def late_starters(own: Doing, states: Sequence[RankState], patience: float) -> list[tuple[int, str]]:
    """Which ranks a start that takes too long waits for, and where each of them is.

    Args:
        own: what the orchestrator, rank 0, does.
        states: of all workers.
        patience: seconds of silence that go without saying.

    Returns:
        Ranks and words such as "weights 34 %", "warming up", "in the step 'verdict'" or "not heard of". Rank 0 when all
        others are done.
    """
    late = []
    for state in states:
        if state.doing is None:
            late.append((state.rank, "not heard of"))
        elif state.silent_seconds > patience:
            late.append((state.rank, f"{state.doing.words}, silent for {state.silent_seconds:.0f} s"))
        elif state.doing.phase.is_start and state.doing.phase not in (Phase.CHECKED, Phase.LOADED):
            late.append((state.rank, state.doing.words))
    return late or [(0, own.words)]


def find_stuck(ranks: Mapping[int, Progress], size: int) -> list[int]:
    """Which ranks of a job of `size` hold up the others on their way to work.

    Args:
        ranks: those that were ever heard of.
        size: ranks of the job.

    Returns:
        Ranks that were never heard of before others; then silent ones before those that wait, and of ranks that look
        alike those that have come least far; a stopped process, which is surely the cause, alone.
    """
    unheard = [rank for rank in range(size) if rank not in ranks]
    if unheard:
        return unheard
    busy = {rank: progress for rank, progress in ranks.items() if not progress.is_done}
    silent = [rank for rank, progress in busy.items() if progress.is_silent]
    # Of ranks that are all inside the start of MPI, the stopped one looks like those that wait for it.
    candidates = silent or list(busy)
    earliest = min(busy[rank].step for rank in candidates)
    if not silent or earliest == FIRST_STEP:
        candidates = [rank for rank in candidates if busy[rank].step == earliest]
    stopped = [rank for rank in candidates if busy[rank].is_stopped]
    return sorted(stopped or candidates)
