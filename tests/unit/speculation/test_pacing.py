"""Pacing: the draft_len that the run's own times and acceptances say pays most, and no text that depends on it.

Rounds come from a machine whose costs and acceptance are written down, with noise, so that the best answer is known.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.errors import ConfigError
from trtrun.roles.engine_ranks import EngineRanks
from trtrun.speculation.pacing import Pacer
from trtrun.speculation.round_costs import RoundCosts
from trtrun.timing.spans import RankSpans
from trtrun.wire.reports import RoundReport

MOST = 5


@dataclass
class Machine:
    """Rounds of a known cost in milliseconds: drafting by token, verifying by what waits longest, memory or arithmetic.

    Attributes:
        acceptance: chance of each draft token, once those before it were accepted.
        noise: deviation of the times, as a share of them.
    """

    acceptance: float
    draft_ms: float = 2.5
    weights_ms: float = 18.0
    position_ms: float = 0.9
    noise: float = 0.03
    generator: random.Random = field(default_factory=lambda: random.Random(5))

    def cost(self, num_rows: int, draft_len: int) -> float:
        """Milliseconds of a round, without noise."""
        drafting = self.draft_ms * (draft_len + 1) * (1 + num_rows / 16)
        return drafting + max(self.weights_ms, self.position_ms * num_rows * (draft_len + 1))

    def goodput(self, num_rows: int, draft_len: int) -> float:
        """Tokens a millisecond that a row may expect."""
        return sum(self.acceptance**count for count in range(draft_len + 1)) / self.cost(num_rows, draft_len)

    def share_of_good(self, num_rows: int, chosen: list[int]) -> float:
        """How many of these choices have a goodput within a tenth of the best."""
        goodputs = [self.goodput(num_rows, draft_len) for draft_len in range(MOST + 1)]
        return sum(goodputs[draft_len] >= 0.9 * max(goodputs) for draft_len in chosen) / len(chosen)

    def run(self, pacer: Pacer, num_rows: int, rounds: int) -> list[int]:
        """Run rounds as the pacer wants them; returns the draft_len of each."""
        chosen = []
        for _ in range(rounds):
            draft_len = pacer.choose(num_rows)
            chosen.append(draft_len)
            accepted = [self._accept(draft_len) for _ in range(num_rows)]
            pairs = [(draft_len, count) for count in accepted] if draft_len else []
            pacer.record(num_rows, draft_len, self.cost(num_rows, draft_len) * self._noise() / 1e3, pairs)
        return chosen

    def speed(self, pacer: Pacer, num_rows: int, tokens: int) -> float:
        """Tokens a millisecond and row over rounds as the pacer wants them, until a row has so many."""
        gained = took = 0.0
        while gained < tokens:
            draft_len = pacer.choose(num_rows)
            accepted = [self._accept(draft_len) for _ in range(num_rows)]
            cost = self.cost(num_rows, draft_len) * self._noise()
            pacer.record(num_rows, draft_len, cost / 1e3, [(draft_len, count) for count in accepted if draft_len])
            gained, took = gained + 1 + sum(accepted) / num_rows, took + cost
        return gained / took

    def costs(self) -> RoundCosts:
        """What a start on this machine measures."""
        lens = (0, 1, MOST // 2, MOST)
        return RoundCosts(
            {rows: {n: self.cost(rows, n) * self._noise() / 1e3 for n in lens} for rows in (1, 4, 16, 64)}
        )

    def _accept(self, draft_len: int) -> int:
        count = 0
        while count < draft_len and self.generator.random() < self.acceptance:
            count += 1
        return count

    def _noise(self) -> float:
        return max(0.5, self.generator.gauss(1.0, self.noise))


def test_the_configured_draft_len_is_the_answer_until_something_is_known() -> None:
    pacer = Pacer(MOST)
    assert [pacer.choose(rows) for rows in (1, 7, 32)] == [MOST] * 3


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 32, 64, 200])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.87, 0.98])
def test_it_finds_what_pays_most(num_rows: int, acceptance: float, has_costs: bool) -> None:
    """From the hundredth round on, nearly all have a draft_len close to the best, whatever load and draft are."""
    machine = Machine(acceptance)
    chosen = machine.run(Pacer(MOST, machine.costs() if has_costs else None), num_rows, 500)
    assert machine.share_of_good(num_rows, chosen[100:]) > 0.93, chosen


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 128])
def test_the_first_texts_of_a_process_are_no_slower_than_plain_ones(num_rows: int, acceptance: float) -> None:
    """With what the start measured, 64 tokens are hardly slower even with a draft that is never right."""
    shares = []
    for seed in range(9):
        machine = Machine(acceptance, generator=random.Random(seed))
        pacer = Pacer(MOST, machine.costs())
        shares.append(machine.speed(pacer, num_rows, 64) * machine.cost(num_rows, 0))
    assert sorted(shares)[4] > 0.96, shares


def test_costs_that_the_start_measured_are_corrected_by_rounds() -> None:
    """The start found verifying cheap, and it is not: contexts are long, say."""
    cheap, machine = Machine(0.6, position_ms=0.0), Machine(0.6)
    pacer = Pacer(MOST, cheap.costs())
    assert pacer.choose(16) > 1
    assert machine.share_of_good(16, machine.run(pacer, 16, 500)[100:]) > 0.93


def test_rounds_of_far_more_rows_than_were_measured_are_learned_on_the_way() -> None:
    machine = Machine(0.0)
    costs = RoundCosts({1: {0: 0.02, 1: 0.03, MOST: 0.05}})
    assert costs.covers(2) and not costs.covers(3)
    pacer = Pacer(MOST, costs)
    assert pacer.choose(64) == MOST
    assert machine.share_of_good(64, machine.run(pacer, 64, 500)[100:]) > 0.93


def test_costs_between_those_measured_are_on_lines() -> None:
    costs = RoundCosts({1: {0: 1.0, 1: 2.0, 5: 4.0}, 4: {0: 2.5, 1: 5.0, 5: 7.0}, 8: {0: 2.0, 1: 5.0, 5: 9.0}})
    assert costs.estimate(1, 1) == 2.0 and costs.estimate(4, 5) == 7.0
    assert costs.estimate(1, 3) == 3.0
    assert costs.estimate(2, 0) == 1.5 and costs.estimate(3, 3) == pytest.approx(5.0)
    assert costs.estimate(6, 5) == 8.0 and costs.estimate(16, 5) == 13.0
    assert costs.estimate(6, 0) == 2.5, "noise makes no round of more rows a shorter one"


def test_a_good_draft_of_one_row_keeps_its_length_and_trials_are_rare() -> None:
    chosen = Machine(0.98).run(Pacer(MOST), 1, 2000)
    assert chosen[:8] == [MOST] * 8
    assert 0.95 * len(chosen) < chosen.count(MOST) < len(chosen), "a pacer that never tries anything cannot know"


def test_a_useless_draft_is_left_alone_and_taken_up_again_when_it_becomes_good() -> None:
    machine = Machine(0.0)
    pacer = Pacer(MOST)
    assert machine.run(pacer, 4, 300)[-100:].count(0) > 90
    machine.acceptance = 0.95
    assert machine.share_of_good(4, machine.run(pacer, 4, 2000)[-100:]) > 0.9


def test_each_load_has_its_own_answer() -> None:
    machine = Machine(0.8)
    pacer = Pacer(MOST)
    machine.run(pacer, 1, 300)
    machine.run(pacer, 64, 300)
    few, many = machine.run(pacer, 1, 20), machine.run(pacer, 64, 20)
    assert min(few) > max(many)
    assert machine.share_of_good(1, few) == machine.share_of_good(64, many) == 1.0


@pytest.mark.parametrize(("num_plain", "pays"), [(0, True), (16, True), (31, False)])
def test_what_plain_rows_lose_by_a_longer_round_counts(num_plain: int, pays: bool) -> None:
    """Drafts make a round a quarter longer, and rows that have them gain 2.3 tokens in place of one."""
    pacer, generator, chosen = Pacer(MOST), random.Random(5), []
    for _ in range(300):
        chosen.append(draft_len := pacer.choose(32, num_plain))
        accepted = [next((n for n in range(draft_len) if generator.random() > 0.6), draft_len) for _ in range(32)]
        acceptances = [(draft_len, count) for count in accepted[num_plain:]] if draft_len else []
        pacer.record(32, draft_len, 1.0 + 0.05 * draft_len, acceptances, num_plain)
    assert (sum(chosen[-100:]) > 300) == pays
    assert pacer.choose(32, 32 - num_plain) in range(MOST + 1), "another share of them is another load"


@pytest.mark.parametrize("before", range(200, 208))
def test_one_slow_round_changes_nothing(before: int) -> None:
    """The first use of a kernel may take a second."""
    machine = Machine(0.98, noise=0.0)
    pacer = Pacer(MOST)
    machine.run(pacer, 1, before)
    pacer.record(1, MOST, 5.0, [(MOST, MOST)])
    assert machine.run(pacer, 1, 40).count(MOST) >= 37


def test_acceptance_counts_a_position_only_where_all_before_it_were_accepted() -> None:
    pacer = Pacer(3)
    for _ in range(400):
        pacer.record(2, 3, None, [(3, 3), (3, 0)])
    # Position 0 is accepted in one of two rows; where it is, everything is.
    assert pacer.expected_tokens(0) == 1.0
    assert pacer.expected_tokens(1) == pytest.approx(1.5, abs=0.02)
    assert pacer.expected_tokens(3) == pytest.approx(2.5, abs=0.05)


def test_between_two_draft_lens_that_it_knows_it_expects_times_between_theirs() -> None:
    pacer = Pacer(MOST)
    for _ in range(4):
        pacer.record(1, 0, 1.0, [])
        pacer.record(1, MOST, 1.0 + MOST, [(MOST, MOST)])
    # Every draft token costs as much as a token of the target: none can pay, and one at most is worth a trial.
    assert pacer.choose(1) <= 1


def test_rounds_without_a_time_teach_acceptance_only() -> None:
    pacer = Pacer(MOST)
    for _ in range(300):
        pacer.record(4, MOST, None, [(MOST, 0)] * 4)
    assert pacer.choose(4) == MOST
    assert pacer.expected_tokens(MOST) < 1.1


class TimedRanks:
    """A ranks whose rounds take what a Machine says: `clock` moves by a round's cost when its report comes."""

    def __init__(self, ranks: EngineRanks, machine: Machine) -> None:
        self.plans: list[RoundPlan] = []
        self._ranks = ranks
        self._machine = machine
        self._due: deque[RoundPlan] = deque()
        self._now = 0.0

    def clock(self) -> float:
        return self._now

    def publish(self, plan: RoundPlan) -> None:
        self.plans.append(plan)
        self._due.append(plan)
        self._ranks.publish(plan)

    def collect(self) -> RoundReport:
        report = self._ranks.collect()
        plan = self._due.popleft()
        self._now += self._machine.cost(len(plan.decode_rows), plan.draft_len) / 1e3
        return report

    @property
    def draft_is_lost(self) -> bool:
        return self._ranks.draft_is_lost

    def reset(self) -> None:
        self._ranks.reset()

    def start_trace(self, most_rounds: int) -> None:
        self._ranks.start_trace(most_rounds)

    def take_trace(self) -> list[RankSpans]:
        return self._ranks.take_trace()

    def stepping(self) -> AbstractContextManager[None]:
        return self._ranks.stepping()

    def close(self) -> None:
        self._ranks.close()


def draft_lens(llm: LLM, machine: Machine, sampling: list[SamplingParams]) -> tuple[Any, list[int]]:
    """The tokens of prompts run together on `machine`'s clock, of which the start knew nothing, and the draft_len of
    every round with all rows."""
    if llm.engine.orchestrator._pacer is not None:
        llm.engine.orchestrator._pacer = Pacer(MOST)
    ranks = TimedRanks(llm.engine.orchestrator._ranks, machine)
    llm.engine.orchestrator._ranks, llm.engine.orchestrator._clock = ranks, ranks.clock
    outputs = llm.generate([prompt_of(12, seed=index) for index in range(len(sampling))], sampling)
    llm.check_idle()
    full = [plan.draft_len for plan in ranks.plans if len(plan.decode_rows) == len(sampling) and not plan.prefill]
    return tokens_of(outputs), full


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that often agrees with it."""
    folder = tmp_path_factory.mktemp("pacing")
    target = make_checkpoint(folder / "target", dtype=torch.bfloat16, num_hidden_layers=2)
    return target, noisy_copy(folder / "draft", target, noise=0.05)


SAMPLING = [
    SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.7 * (index % 2), seed=index) for index in range(4)
]
COSTLY = Machine(0.0, position_ms=9.0)
"""Four rows are arithmetic on it: drafting five tokens never pays."""


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_the_text_is_that_of_the_target_alone_while_draft_len_changes(
    pair: tuple[Path, Path], plans_ahead: int
) -> None:
    with make_llm(pair[0]) as llm:
        expected, _ = draft_lens(llm, COSTLY, SAMPLING)
    settings: dict[str, Any] = {"scheduler": {"plans_ahead": plans_ahead}}
    with make_llm(*pair, speculation={"draft_len": MOST, "pacing": "measured"}, **settings) as llm:
        paced, lens = draft_lens(llm, COSTLY, SAMPLING)
    assert paced == expected
    assert lens[0] == MOST
    assert set(lens) > {0, MOST}
    assert sum(lens[-20:]) < 20 * 2
    with make_llm(*pair, speculation={"draft_len": MOST, "pacing": "fixed"}, **settings) as llm:
        fixed, lens = draft_lens(llm, COSTLY, SAMPLING)
    assert fixed == expected
    assert set(lens[:20]) == {MOST}


class NotingPacer(Pacer):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(MOST)
        self.told: list[tuple[int, int, float | None, list[tuple[int, int]]]] = []

    def record(
        self,
        num_rows: int,
        draft_len: int,
        seconds: float | None,
        acceptances: Sequence[tuple[int, int]],
        num_plain: int = 0,
    ) -> None:
        super().record(num_rows, draft_len, seconds, acceptances, num_plain)
        self.told.append((num_rows, draft_len, seconds, list(acceptances)))


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_the_pacer_is_told_what_each_round_took_and_accepted(pair: tuple[Path, Path], plans_ahead: int) -> None:
    """Also where the next plan is out before the verdict; rounds with a prompt's chunk have no time."""
    scheduler = {"plans_ahead": plans_ahead, "max_num_tokens": 48, "max_batch_size": 4}
    with make_llm(*pair, speculation={"draft_len": MOST, "pacing": "measured"}, scheduler=scheduler) as llm:
        pacer = llm.engine.orchestrator._pacer = NotingPacer()
        ranks = TimedRanks(llm.engine.orchestrator._ranks, COSTLY)
        llm.engine.orchestrator._ranks, llm.engine.orchestrator._clock = ranks, ranks.clock
        outputs = llm.generate([prompt_of(70, seed=index) for index in range(3)], SAMPLING[:3])
    plans = [plan for plan in ranks.plans if len(plan.decode_rows)]
    assert len(pacer.told) == len(plans)
    for plan, (num_rows, draft_len, seconds, acceptances) in zip(plans, pacer.told, strict=True):
        assert (num_rows, draft_len) == (len(plan.decode_rows), plan.draft_len)
        if plan.prefill:
            assert seconds is None
        else:
            assert seconds == pytest.approx(COSTLY.cost(num_rows, draft_len) / 1e3)
        assert [drafted for drafted, _ in acceptances] == [length for length in plan.draft_lens.tolist() if length > 0]
    assert any(plan.prefill for plan in plans)
    kept = sum(count for *_, acceptances in pacer.told for _, count in acceptances)
    counted = sum(output.completions[0].statistics.num_accepted_draft_tokens for output in outputs)
    # A plan that was out when its row ended is told, too, and belongs to no request.
    assert kept == counted if not plans_ahead else kept >= counted > 0


class ScriptedPacer(Pacer):
    """Says the same draft lens over and over."""

    def __init__(self, lens: list[int]) -> None:
        super().__init__(max(lens))
        self._lens = itertools.cycle(lens)

    def choose(self, num_rows: int, num_plain: int = 0) -> int:
        return next(self._lens)


@pytest.mark.parametrize("lens", [[4, 0, 0, 0], [4] + [0] * 6, [4] + [0] * 20])
def test_a_draft_that_sat_rounds_out_drafts_as_well_as_before(tmp_path: Path, lens: list[int]) -> None:
    """The target's own copy is right every time, so each token that it proposes is accepted: its keys have no hole."""
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=2)
    speculation = {"draft_len": 4, "pacing": "measured"}
    with make_llm(target, target, speculation=speculation, scheduler={"max_batch_size": 4}) as llm:
        llm.engine.orchestrator._pacer = ScriptedPacer(lens)
        sampling = SamplingParams(max_tokens=120, ignore_eos=True)
        llm.generate([prompt_of(length, seed=length) for length in (1, 2, 17, 40)], sampling)
        statistics = llm.statistics()
    assert statistics["num_draft_tokens"] > 40
    # Drafts that reach over the end of a text are cut, not rejected: all are counted as accepted.
    assert statistics["num_accepted_draft_tokens"] == statistics["num_draft_tokens"]


def test_a_catch_up_writes_what_each_row_lacks_and_nothing_before_it(pair: tuple[Path, Path]) -> None:
    """What lies before may be shared with other rows by then."""
    untouched = 7.0
    with make_llm(*pair, dtype="float32") as llm:  # in bfloat16 a kernel may lay the store out in its own way
        engine = llm.engine.orchestrator._ranks._worker.drafter._engine
        engine.rows.lengths[:2] = torch.tensor([5, 20])
        engine.rows.block_tables[:2, :2] = torch.tensor([[1, 2], [3, 4]])
        engine._store.data.fill_(untouched)
        engine.catch_up(torch.tensor([0, 1]), [3, 8], context=20)
        store = engine._store.data[:, :, 1:5].transpose(3, 4).flatten(2, 3)  # [layers, 2, 4 * block, kv_heads, head]
        written = (store != untouched).flatten(3).all(dim=3).all(dim=0).all(dim=0)
        kept = (store == untouched).flatten(3).all(dim=3).all(dim=0).all(dim=0)
    expected = [2, 3, 4, *range(32 + 12, 32 + 20)]
    assert written.nonzero().flatten().tolist() == expected
    assert kept.sum() == 64 - len(expected)


def test_with_use_logits_the_text_of_a_seed_does_not_depend_on_times(pair: tuple[Path, Path]) -> None:
    speculation = {"draft_len": MOST, "pacing": "measured", "use_logits": True}
    found = []
    for machine in (COSTLY, Machine(0.0)):
        with make_llm(*pair, speculation=speculation) as llm:
            tokens, lens = draft_lens(llm, machine, SAMPLING)
        assert set(lens[:20]) == {MOST}
        found.append(tokens)
    assert found[0] == found[1]


def test_a_pacing_of_another_name_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.pacing.*measured.*fixed"):
        configuration(*pair, speculation={"pacing": "clever"})


def test_a_load_that_is_new_begins_as_the_nearest_one_does() -> None:
    pacer = Pacer(4)
    pacer.record(1, 4, 0.1, [(4, 4)])
    for _ in range(300):
        draft_len = pacer.choose(32)
        pacer.record(32, draft_len, 0.1 * (1 + 10 * draft_len), [(draft_len, 0)] * 32 if draft_len else [])
    assert (pacer.choose(28), pacer.choose(2)) == (0, 4)


@pytest.mark.parametrize("method", ["draft_target", "ngram"])
def test_a_start_measures_rounds_and_leaves_no_trace(pair: tuple[Path, Path], method: str) -> None:
    target, draft = pair
    models = (target, draft) if method == "draft_target" else (target,)
    prompts = [prompt_of(12, seed=index) for index in range(4)]
    with make_llm(target) as llm:
        expected = tokens_of(llm.generate(prompts, SAMPLING))
    speculation = {"draft_len": MOST, "pacing": "measured", "method": method}
    with make_llm(*models, speculation=speculation, scheduler={"max_batch_size": 6}) as llm:
        orchestrator = llm.engine.orchestrator
        assert orchestrator._pacer is not None and orchestrator._pacer._costs is not None
        measured = orchestrator._pacer._costs.seconds
        assert next(iter(measured)) == 1 and set(measured) <= {1, 4, 6}
        for of_rows in measured.values():
            assert list(of_rows) == [0, 1, MOST // 2, MOST] and min(of_rows.values()) > 0
        assert llm.statistics()["num_rounds"] == 0
        assert tokens_of(llm.generate(prompts, SAMPLING)) == expected
        llm.check_idle()


def test_contexts_that_are_too_short_to_try_rounds_in_are_not_tried(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", max_position_embeddings=20)
    with make_llm(target, target, speculation={"draft_len": MOST, "pacing": "measured"}) as llm:
        assert llm.engine.orchestrator._pacer is not None and llm.engine.orchestrator._pacer._costs is None
        assert len(tokens_of(llm.generate([prompt_of(4)], [SamplingParams(max_tokens=8, ignore_eos=True)]))[0][0]) == 8
