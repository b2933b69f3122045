"""What the start measures of drafting ahead and behind, on ranks whose times are written down."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints import make_checkpoint, make_draft
from pipelines import configuration

from trtrun.core.nouns import RoundPlan
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.speculation.ahead.ahead_costs import AheadCosts, AheadLoad, AheadRound, costs_between, costs_of
from trtrun.speculation.round_costs import assume_costs
from trtrun.start import policies
from trtrun.start.ahead_rounds import count_ahead_rounds, measure_ahead_costs
from trtrun.wire.reports import RoundReport, RoundTimes

LIMITS = SchedulerLimits(16, 512, 2048, 2048, 5, 64, 16, plans_ahead=1)
STEPS = (8, 32, 128)
ASSUMED = assume_costs((1, 4, 16), 5, LIMITS.num_verified, 12, 0.15)


class TimedRanks:
    """Ranks whose `clock` moves by what a round takes when its verdict comes, which `growth` of each row beside the
    first adds to. Of guesses a share hits."""

    stepping = nullcontext

    def __init__(self, verifying: float, drafting: float, guess: float, hits: bool, growth: float = 0.0) -> None:
        self.plans: list[RoundPlan] = []
        self._times, self._hits, self._growth = (verifying, drafting, guess), hits, growth
        self._due: deque[RoundPlan] = deque()
        self._now = self._drafted = self._verdict = 0.0
        self._guessed = 0

    def clock(self) -> float:
        return self._now

    def publish(self, plan: RoundPlan) -> None:
        self.plans.append(plan)
        self._due.append(plan)

    def collect(self) -> RoundReport:
        plan = self._due.popleft()
        rows = len(plan.decode_rows)
        verifying, drafting, guess = (took * (1 + self._growth * max(0, rows - 1)) for took in self._times)
        hits = self._hits and self._guessed > 0
        redrafts = drafting if rows and not hits else 0.0
        began = max(self._drafted, self._verdict)
        self._verdict = self._now = began + redrafts + verifying
        self._drafted = began + redrafts + plan.num_guesses * guess
        self._guessed = plan.num_guesses
        lens = [plan.draft_len] * rows
        times = RoundTimes(verifying=verifying)
        return RoundReport(plan.round_index, times, True, [1] * rows, lens, [[5]] * rows, [], [hits] * rows)


def measure(ranks: TimedRanks, limits: SchedulerLimits = LIMITS) -> dict[int, AheadCosts]:
    return measure_ahead_costs(cast(EngineRanks, ranks), limits, STEPS, ASSUMED, ranks.clock)


@pytest.mark.parametrize("hits", [True, False])
def test_both_ways_of_all_numbers_of_rows(hits: bool) -> None:
    """Whether made-up drafts are right or not: of those that are not what a fresh draft takes is left out."""
    ranks = TimedRanks(0.004, 0.003, 0.0002, hits)
    found = measure(ranks)
    assert list(found) == [1, 4, 16]
    assert {rows: list(costs.ahead) for rows, costs in found.items()} == {
        1: [8, 32, 128],
        4: [8, 32, 128],
        16: [32, 128],
    }
    for costs in found.values():
        assert costs.verifying == pytest.approx(0.004) and costs.beside == pytest.approx(0.007)
        assert costs.ahead == pytest.approx({count: max(0.004, 0.0002 * count) for count in costs.ahead})
    assert len(ranks.plans) == count_ahead_rounds(LIMITS, STEPS) + 1
    assert set(ranks.plans[-1].dropped_rows) == set(range(len(ranks.plans[-2].decode_rows))), "no row is left"
    assert {plan.num_guesses for plan in ranks.plans} == {0, *STEPS}
    assert all(plan.redraft_threshold == 1 for plan in ranks.plans)


def test_where_rounds_take_long_both_ways_of_few_numbers_are_measured() -> None:
    ranks = TimedRanks(0.04, 0.03, 0.0005, hits=True)
    found = measure(ranks)
    assert ranks.clock() < 1.1 and len(ranks.plans) < count_ahead_rounds(LIMITS, STEPS)
    assert all(costs.beside == pytest.approx(0.07) and 8 in costs.ahead for costs in found.values()) and 1 in found
    slow = TimedRanks(3.0, 1.0, 0.01, hits=True)
    assert measure(slow) == {} and len(slow.plans) == 3, "two rounds, which told that there is no time"


@pytest.mark.parametrize("seconds", [0.002, 0.01, 0.05, 0.12])
def test_rounds_of_many_rows_are_as_slow_as_is_foreseen(seconds: float) -> None:
    """Few rounds of one row are known when those of most rows are begun."""
    ranks = TimedRanks(seconds, seconds / 2, seconds / 100, hits=False, growth=0.5)
    found = measure(ranks)
    assert ranks.clock() < 1.1
    assert 1 in found and (seconds > 0.005 or 16 in found), "what there is time for is measured"


def test_nothing_is_measured_without_drafts_or_guesses() -> None:
    ranks = TimedRanks(0.004, 0.003, 0.0002, hits=True)
    assert measure_ahead_costs(cast(EngineRanks, ranks), LIMITS, (), ASSUMED, ranks.clock) == {} and not ranks.plans


@pytest.mark.parametrize(("ahead", "outnumber", "measures"), [("auto", False, 1), ("auto", True, 0), ("on", False, 0)])
def test_what_is_compared_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: str, outnumber: bool, measures: int
) -> None:
    monkeypatch.setattr(policies, "outnumber_cores", lambda *_: outnumber)
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    settings: dict[str, Any] = {"speculation": {"draft_len": 3, "ahead": ahead}, "devices": (["cpu:0"], ["cpu:1"])}
    config = configuration(target, draft, **settings)
    assert config.drafts_ahead
    limits = SchedulerLimits.of(config, 2048, 2048, 9)
    assert (policies.count_first_rounds(config, limits)[2] > 0) == measures


def test_between_numbers_of_rows_that_were_measured() -> None:
    costs = {1: AheadCosts(4.0, 8.0, {8: 5.0, 32: 7.0}), 5: AheadCosts(6.0, 12.0, {32: 9.0})}
    assert costs_between({}, 3) is None
    assert costs_between(costs, 1) == costs[1] and costs_between(costs, 7) == costs[5]
    assert costs_between(costs, 2) == AheadCosts(4.5, 9.0, {32: 7.5})
    assert costs[1].of_shorter(0.5) == AheadCosts(4.0, 6.0, {8: 4.0, 32: 4.0})


def test_a_load_goes_by_the_start_until_rounds_say_otherwise() -> None:
    load = AheadLoad()
    assert not load.redrafting() and not load.beside() and not load.ahead()
    load.begin_with(AheadCosts(4.0, 9.0, {8: 6.0}))
    assert (load.redrafting(), load.beside(), load.ahead()) == (5.0, 9.0, {8: 6.0})
    for _ in range(9):
        load.record(AheadRound(1, 5, 8, 1, False, 4.0, 7.0, [3], [5]))
        load.record(AheadRound(1, 5, 32, 0, True, 4.0, 13.0, [3], [5]))
    assert load.ahead() == {8: 7.0, 32: 8.0}, "without the fresh draft, which takes five"


def test_rounds_of_one_way_alone_are_no_costs() -> None:
    assert costs_of([AheadRound(1, 5, 8, 1, False, 4.0, 7.0, [3], [5])]) is None
    assert costs_of([AheadRound(1, 5, 0, 0, True, 4.0, 7.0, [3], [5])]) is None
