"""Who is at fault when a job stands still: decided from ranks' states and stacks alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from parallel.watchdog.activity import NO_ROUND, Beside, Doing, Phase
from parallel.watchdog.fault_attribution import (
    CLOSED_SECONDS,
    LOST_SECONDS,
    Accusation,
    RankState,
    StacksWanted,
    examine,
    find_broken,
    find_lost,
    late_starters,
)
from parallel.watchdog.processes import Stack

LIMIT, PATIENCE = 60.0, 4.0
WAITS, WORKS = Stack("  in a communicator\n", True), Stack("  in a loop\n", False)
COLLECTING = Doing(Phase.AWAITING_REPORT, 17, 61, 61)


def in_round(
    rank: int, phase: Phase = Phase.VERIFYING, seconds: float = 61, index: int = 17, **more: float
) -> RankState:
    return RankState(rank, Doing(phase, index, seconds, seconds), **more)


def idle(rank: int, seconds: float = 0.0, index: int = 17, **more: float) -> RankState:
    return RankState(rank, Doing(Phase.IDLE, index, seconds, seconds), **more)


def judge(
    own: Doing,
    *states: RankState,
    stacks: Mapping[int, Stack] | None = None,
    unawaited: Collection[int] = (),
    still_limit: float | None = None,
) -> object:
    return examine(own, states, LIMIT, PATIENCE, stacks, unawaited, still_limit)


def test_nobody_is_late_within_the_limit() -> None:
    own = Doing(Phase.AWAITING_REPORT, 17, 59, 59)
    assert judge(own, in_round(1, seconds=59), in_round(2, seconds=59, silent_seconds=3)) is None
    assert judge(Doing(Phase.SCHEDULING, 17, 59, 59), idle(1), idle(2)) is None


def test_who_waits_for_a_plan_or_for_its_user_is_never_late() -> None:
    own = Doing(Phase.IDLE, 17, 9999, 9999)
    assert judge(own, idle(1, 9999), idle(2, 9999)) is None
    assert judge(own, RankState(1, Doing(Phase.IDLE, NO_ROUND, 9999, 9999))) is None


def test_what_stands_still_outside_of_rounds_is_named_with_its_phase() -> None:
    own, moving = Doing(Phase.AWAITING_REPORT, 90, 0.1, 0.1), in_round(1, seconds=0.1, index=90)
    for still, found in ((299.0, None), (301.0, "stands still in loading adapter 'x' for longer than 300 s")):
        work = Beside("adapters", "loading adapter 'x'", still, 400.0, 300.0)
        beside = RankState(2, Doing(Phase.VERIFYING, 90, 0.1, 0.1, beside=(work,)))
        assert judge(own, moving, beside) == (found and Accusation((2,), found))
    installing = Doing(Phase.ADAPTERS, 90, 61, 61, step="in installing adapter 'x'")
    line = "stands still in installing adapter 'x' for longer than 60 s"
    assert judge(own, moving, RankState(2, installing)) == Accusation((2,), line)
    assert judge(installing, idle(1), idle(2)) == Accusation((0,), line)
    assert judge(Doing(Phase.ORDERED, 90, 59, 59), idle(1)) is None
    for ticks, found in ((False, None), (True, "stands still idle after round 90 for longer than 60 s")):
        rest = Doing(Phase.IDLE, 90, 61, 61, ticks=ticks)
        assert judge(rest, idle(1, 999)) == (found and Accusation((0,), found))


def test_a_rank_without_which_rounds_go_on_may_stand_still_beside_them() -> None:
    own = Doing(Phase.AWAITING_REPORT, 90, 0.1, 0.1)
    moving = [in_round(rank, seconds=0.1, index=90) for rank in (3, 4)]
    late = [in_round(1, Phase.DRAFTING), in_round(2, Phase.DRAFTING)]
    assert judge(own, *late, *moving) is None, "the others may be waiting for it"
    assert judge(own, *late, *moving, unawaited=(1, 2)) == StacksWanted()
    found = judge(own, *late, *moving, stacks={1: WAITS, 2: WORKS}, unawaited=(1, 2))
    assert found == Accusation((2,), "stands still in round 17 (drafting) for longer than 60 s")
    late = [in_round(1, Phase.AWAITING_VERDICT), in_round(2, Phase.ANTICIPATING, seconds=59)]
    assert judge(own, *late, *moving, unawaited=(1, 2)) is None, "it waits, or has not stood still for long"


def test_a_silent_rank_is_at_fault_however_late_the_others_are() -> None:
    found = judge(COLLECTING, in_round(1), in_round(2, silent_seconds=60.5), in_round(3))
    assert found == Accusation((2,), "silent for 60 s, last seen in round 17 (verifying)")


def test_all_silent_ranks_are_accused_together() -> None:
    found = judge(COLLECTING, in_round(1), in_round(2, silent_seconds=61), in_round(3, silent_seconds=61))
    assert isinstance(found, Accusation) and found.ranks == (2, 3)


def test_what_a_silent_rank_missed_is_said() -> None:
    found = judge(COLLECTING, in_round(1), idle(2, index=16, silent_seconds=61))
    assert found == Accusation((2,), "silent for 60 s, last seen idle after round 16; the job is in round 17")


def test_late_ranks_are_not_judged_while_one_may_turn_out_to_be_silent() -> None:
    assert judge(COLLECTING, in_round(1), in_round(2, seconds=10, silent_seconds=PATIENCE + 1)) is None
    assert judge(COLLECTING, in_round(1), in_round(2, seconds=10, closed_seconds=1)) is None


def test_a_late_round_needs_stacks() -> None:
    assert judge(COLLECTING, in_round(1), in_round(2)) == StacksWanted()


def test_a_round_in_which_any_rank_gets_on_is_slow_and_not_stuck() -> None:
    """However long the round has lasted, and however long the others have waited for that rank."""
    slow = RankState(2, Doing(Phase.VERIFYING, 17, still_seconds=3, phase_seconds=900))
    assert judge(COLLECTING, in_round(1, Phase.AWAITING_VERDICT, seconds=900), slow) is None


@pytest.mark.parametrize("culprit", [1, 2, 3])
def test_the_rank_that_waits_for_nobody_holds_up_the_others(culprit: int) -> None:
    states = [in_round(1, Phase.AWAITING_VERDICT), in_round(2), in_round(3)]
    stacks = {rank: WORKS if rank == culprit else WAITS for rank in (1, 2, 3)}
    found = judge(COLLECTING, *states, stacks=stacks)
    assert isinstance(found, Accusation) and found.ranks == (culprit,)
    assert found.cause.endswith("for longer than 60 s")


def test_a_rank_that_waits_is_passed_over_for_one_that_has_stood_still_for_less_long() -> None:
    """The draft entered the round first; the target, which entered later, is what it waits for."""
    waited_for = in_round(2)
    assert judge(COLLECTING, in_round(1), in_round(2, seconds=58)) is None
    found = judge(COLLECTING, in_round(1, seconds=63), waited_for, stacks={1: WAITS, 2: WORKS})
    assert found == Accusation((2,), "stands still in round 17 (verifying) for longer than 60 s")


def test_of_ranks_that_work_the_one_that_is_behind_is_at_fault() -> None:
    """With NCCL the host waits for the device outside of any communicator."""
    states = [in_round(1, index=18), in_round(2, Phase.REPORTING), in_round(3, Phase.VERIFYING)]
    found = judge(COLLECTING, *states, stacks=dict.fromkeys((1, 2, 3), WORKS))
    assert isinstance(found, Accusation) and found.ranks == (3,)


def test_where_all_wait_the_one_that_got_least_far_is_named_and_the_line_says_so() -> None:
    states = [in_round(1, Phase.AWAITING_VERDICT), in_round(2), in_round(3, Phase.TRANSFERRING)]
    found = judge(COLLECTING, *states, stacks=dict.fromkeys((1, 2, 3), WAITS))
    cause = "stands still in round 17 (transferring) for longer than 60 s; every rank waits for another"
    assert found == Accusation((3,), cause)


def test_a_rank_that_never_got_the_plan_is_at_fault_when_the_others_wait_for_it() -> None:
    found = judge(COLLECTING, in_round(1), idle(2, 61, index=16), stacks={1: WAITS, 2: WAITS})
    assert found == Accusation((2,), "never got the plan of round 17, last seen idle after round 16")


def test_a_rank_without_an_answer_counts_as_one_that_waits_for_nobody() -> None:
    found = judge(COLLECTING, in_round(1), in_round(2), stacks={1: WAITS})
    assert isinstance(found, Accusation) and found.ranks == (2,)


def test_an_orchestrator_that_stands_still_is_at_fault() -> None:
    found = judge(Doing(Phase.SCHEDULING, 17, 61, 61), idle(1, 61), idle(2, 61))
    assert found == Accusation((0,), "stands still in round 17 (scheduling) for longer than 60 s")


def in_step(rank: int, phase: Phase = Phase.TRAINING, seconds: float = 61, index: int = 17, **more: float) -> RankState:
    return in_round(rank, phase, seconds, index, **more)


def judge_training(*states: RankState, stacks: Mapping[int, Stack] | None = None) -> object:
    """A run whose rank 0 trains as well: the first state is its own."""
    assert states[0].rank == 0 and states[0].doing is not None
    return judge(states[0].doing, *states, stacks=stacks)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_0_that_trains_is_judged_beside_the_others(culprit: int) -> None:
    states = [in_step(0), in_step(1), in_step(2)]
    assert judge_training(*states) == StacksWanted()
    stacks = {rank: WORKS if rank == culprit else WAITS for rank in (0, 1, 2)}
    cause = "stands still in step 17 (training) for longer than 60 s"
    assert judge_training(*states, stacks=stacks) == Accusation((culprit,), cause)


def test_who_waits_beside_ranks_that_train_is_not_at_fault() -> None:
    """Whichever rank trains: rank 0, or another."""
    assert judge_training(in_step(0, seconds=3), in_step(1, Phase.SUMMING, seconds=900)) is None
    assert judge_training(in_step(0, Phase.SUMMING, seconds=900), in_step(1, seconds=3)) is None
    assert judge_training(in_step(0, Phase.FINISHING, seconds=3), in_step(1, Phase.FINISHING, seconds=900)) is None


def test_of_ranks_that_wait_for_a_device_the_one_that_has_come_least_far_in_its_step_is_at_fault() -> None:
    """With NCCL the stacks do not tell that they wait for a sum."""
    for late, early in ((Phase.SUMMING, Phase.TRAINING), (Phase.MEASURED, Phase.MEASURING)):
        found = judge_training(in_step(0, late), in_step(1, early), stacks=dict.fromkeys((0, 1), WORKS))
        assert isinstance(found, Accusation) and found.ranks == (1,)
    saving = in_step(0, Phase.SAVING, index=16)
    found = judge_training(saving, in_step(1, Phase.PREPARING), stacks=dict.fromkeys((0, 1), WORKS))
    assert found == Accusation((0,), "stands still in step 16 (saving) for longer than 60 s")


def test_a_silent_rank_of_a_training_run_is_told_with_its_step() -> None:
    found = judge_training(in_step(0, index=18), in_step(1, silent_seconds=61))
    assert found == Accusation((1,), "silent for 60 s, last seen in step 17 (training); the job is in step 18")


def test_ranks_may_stand_still_for_longer_than_they_may_be_silent() -> None:
    both = [in_step(0, seconds=599), in_step(1, seconds=599)]
    assert both[0].doing is not None
    assert judge(both[0].doing, *both, still_limit=600) is None
    silent = in_step(1, silent_seconds=61)
    found = judge(both[0].doing, both[0], silent, still_limit=600)
    assert isinstance(found, Accusation) and found.ranks == (1,)
    stacks = {0: WAITS, 1: WORKS}
    found = judge(both[0].doing, in_step(0, seconds=601), in_step(1, seconds=601), stacks=stacks, still_limit=600)
    assert found == Accusation((1,), "stands still in step 17 (training) for longer than 600 s")


def test_lost_messages_are_seen_when_everybody_is_idle() -> None:
    lost_report = judge(COLLECTING, idle(1, 61), idle(2, 61))
    assert isinstance(lost_report, Accusation) and lost_report.ranks == (0,)
    assert "every engine rank is done" in lost_report.cause
    lost_plan = judge(COLLECTING, idle(1, 61), idle(2, 61, index=16))
    assert lost_plan == Accusation((2,), "never got the plan of round 17, last seen idle after round 16")
    assert judge(COLLECTING, idle(1, 61), idle(2, 1)) is None  # the report may be on its way
    assert judge(COLLECTING, idle(1, 61), idle(2, 61, silent_seconds=30)) is None


def test_a_broken_connection_counts_after_a_while_and_a_goodbye_never() -> None:
    assert judge(COLLECTING, in_round(1, seconds=1, closed_seconds=CLOSED_SECONDS - 1)) is None
    broken = in_round(1, seconds=1, closed_seconds=CLOSED_SECONDS + 1, silent_seconds=61)
    due = Accusation((1,), "its connection broke, last seen in round 17 (verifying)")
    assert judge(COLLECTING, broken, idle(2)) == find_broken([broken]) == due
    assert judge(Doing(Phase.IDLE), RankState(1, Doing(), 99, 99, has_left=True)) is None
    assert judge(Doing(Phase.IDLE), RankState(1, Doing(), silent_seconds=99, has_left=True)) is None
    assert find_broken([RankState(1, None, 99, 99, has_left=True)]) is None


def test_a_late_start_says_where_each_late_rank_is() -> None:
    states = [
        RankState(1, Doing(Phase.LOADED)),
        RankState(2, None, silent_seconds=600),
        RankState(3, Doing(Phase.WEIGHTS, done=34, total=100)),
        RankState(4, Doing(Phase.WARMING_UP)),
        RankState(5, Doing(Phase.WEIGHTS, done=1, total=8), silent_seconds=30),
        idle(6),
    ]
    assert late_starters(Doing(), states, PATIENCE) == [
        (2, "not heard of"),
        (3, "weights 34 %"),
        (4, "warming up"),
        (5, "weights 12 %, silent for 30 s"),
    ]


def test_a_late_start_in_which_all_others_are_done_is_the_orchestrators() -> None:
    assert late_starters(Doing(Phase.CONNECTING), [idle(1), idle(2)], PATIENCE) == [(0, "opening communicators")]


def test_a_check_waits_for_ranks_that_are_in_a_step() -> None:
    in_step = Doing(Phase.CHECKING, step="verdict")
    states = [RankState(1, Doing(Phase.CHECKED)), RankState(2, in_step), RankState(3, in_step, silent_seconds=9.0)]
    assert late_starters(in_step, states, PATIENCE) == [
        (2, "in the step 'verdict'"),
        (3, "in the step 'verdict', silent for 9 s"),
    ]


def test_a_rank_that_the_job_can_do_without_is_judged_by_itself() -> None:
    well = in_round(1, Phase.DRAFTING, 59)
    for lost, cause in (
        (in_round(2, Phase.DRAFTING), "stands still in round 17 (drafting) for longer than 60 s"),
        (idle(2, silent_seconds=61), "silent for 60 s, last seen idle after round 17"),
        (idle(2, closed_seconds=LOST_SECONDS + 0.01), "its connection broke, last seen idle after round 17"),
        (RankState(2, None, silent_seconds=61), "silent for 60 s, never heard of"),
    ):
        assert find_lost([well, lost], LIMIT) == Accusation((2,), cause)


def test_a_draft_rank_that_waits_leaves_or_has_just_gone_is_not_lost() -> None:
    states = [
        in_round(1, Phase.AWAITING_VERDICT, 9999),
        idle(2, 9999),
        idle(3, closed_seconds=LOST_SECONDS / 2),
        idle(4, has_left=True, closed_seconds=9999),
    ]
    assert find_lost(states, LIMIT) is None
