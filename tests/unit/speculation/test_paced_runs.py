"""Runs whose draft_len changes: texts stay, the pacer is told the truth, and the start measures rounds."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pacing_machine import MOST, Machine
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of

from parallel.watchdog.activity import Activity
from trtrun import LLM, SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.errors import ConfigError
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.speculation.pacing import Pacer
from trtrun.start import warm_up_rounds
from trtrun.timing.spans import RankSpans
from trtrun.wire.reports import RoundReport


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

    @property
    def activity(self) -> Activity:
        return self._ranks.activity

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
        is_partial: bool = False,
    ) -> None:
        super().record(num_rows, draft_len, seconds, acceptances, num_plain, is_partial)
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


def test_prompts_that_a_draft_reads_late_are_read_whole(tmp_path: Path) -> None:
    """While nothing is known of drafts the draft reads eight rows' prompts; the others' with their first draft. The
    target's own copy is right every time where its keys have no hole."""
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=2)
    speculation = {"draft_len": 2, "pacing": "measured"}
    scheduler = {"max_batch_size": 12, "max_num_tokens": 1024}
    with make_llm(target, target, speculation=speculation, scheduler=scheduler) as llm:
        llm.engine.orchestrator._pacer = ScriptedPacer([0, 2, 0])
        ranks = llm.engine.orchestrator._ranks = TimedRanks(llm.engine.orchestrator._ranks, COSTLY)
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        llm.generate([prompt_of(3 + 2 * seed, seed=seed) for seed in range(11)] + [prompt_of(65)], sampling)
        statistics = llm.statistics()
        llm.check_idle()
    chunks = [chunk for plan in ranks.plans for chunk in plan.prefill]
    assert [(chunk.row, chunk.length) for chunk in chunks if not chunk.has_draft_kv] == [(8, 19), (9, 21), (10, 23)]
    assert statistics["num_draft_tokens"] > 100
    assert statistics["num_accepted_draft_tokens"] == statistics["num_draft_tokens"]


@pytest.mark.parametrize("more", [0, 60])
def test_a_catch_up_writes_what_each_row_lacks_and_nothing_before_it(pair: tuple[Path, Path], more: int) -> None:
    """What lies before may be shared with other rows by then. Of many tokens some are fed at a time."""
    untouched, length, lacking = 7.0, 20 + more, 8 + more
    with make_llm(*pair, dtype="float16") as llm:  # of other dtypes a kernel may lay the store out in its own way
        engine = llm.engine.orchestrator._ranks._worker.drafter._engine
        engine.rows.lengths[:2] = torch.tensor([5, length])
        engine.rows.block_tables[:2, :5] = torch.arange(1, 11).view(2, 5)
        next(engine._store.parts())[0].fill_(untouched)
        engine.catch_up(torch.tensor([0, 1]), [3, lacking], context=length)
        store = (
            next(engine._store.parts())[0][:, :, 1:11].transpose(3, 4).flatten(2, 3)
        )  # [layers, 2, 10 * block, kv_heads, head]
        written = (store != untouched).flatten(3).all(dim=3).all(dim=0).all(dim=0)
        kept = (store == untouched).flatten(3).all(dim=3).all(dim=0).all(dim=0)
    expected = [2, 3, 4, *range(80 + 12, 80 + length)]
    assert written.nonzero().flatten().tolist() == expected
    assert kept.sum() == 160 - len(expected)


def test_of_many_tokens_that_a_draft_is_handed_some_are_fed_at_a_time(pair: tuple[Path, Path]) -> None:
    """Memory is set aside for so many of each row: those that draft ahead hand in all that was sat out."""
    most, widths, counts = 80, list[int](), (80, 5)
    with make_llm(*pair, dtype="float32") as llm:
        engine = llm.engine.orchestrator._ranks._worker.drafter._engine
        engine.rows.block_tables[:2, :5] = torch.arange(1, 11).view(2, 5)
        tables = engine.tables(torch.tensor([0, 1]), most)
        tokens = torch.arange(2 * most).view(2, most) % 50
        steps = torch.arange(most)
        positions = torch.stack([torch.where(steps >= most - count, steps - most + count, -1) for count in counts])
        forward = engine._forwards.forward_rows
        engine._forwards.forward_rows = lambda tokens, *rest: widths.append(tokens.shape[1]) or forward(tokens, *rest)
        logits = engine.feed(tokens, positions, tables)
        written = next(engine._store.parts())[0][:, :, 1:11].clone()
        next(engine._store.parts())[0].zero_()
        expected = forward(tokens, positions, tables, 1)
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(written, next(engine._store.parts())[0][:, :, 1:11])
    assert widths == [16, 32, 32]


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


@pytest.mark.parametrize("method", ["draft_target", "ngram"])
def test_a_start_measures_rounds_and_leaves_no_trace(
    pair: tuple[Path, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    plans: list[RoundPlan] = []
    publish = SoloRanks.publish
    monkeypatch.setattr(SoloRanks, "publish", lambda ranks, plan: (plans.append(plan), publish(ranks, plan)))
    models = (target, draft) if method == "draft_target" else (target,)
    prompts = [prompt_of(12, seed=index) for index in range(4)]
    with make_llm(target) as llm:
        expected = tokens_of(llm.generate(prompts, SAMPLING))
    speculation = {"draft_len": MOST, "pacing": "measured", "method": method}
    plans.clear()
    monkeypatch.setattr(warm_up_rounds, "_MOST_SECONDS", 1e9)
    with make_llm(*models, speculation=speculation, scheduler={"max_batch_size": 6}) as llm:
        orchestrator = llm.engine.orchestrator
        assert orchestrator._pacer is not None and orchestrator._pacer._costs is not None
        costs = orchestrator._pacer._costs.seconds
        assert next(iter(costs)) == 1 and set(costs) <= {1, 4, 6}
        for of_rows in costs.values():
            assert {0, MOST} <= set(of_rows) <= set(range(MOST + 1)) and min(of_rows.values()) > 0
        held: set[int] = set()
        for plan in plans:
            assert set(plan.dropped_rows) <= held and not len(plan.block_updates)
            held = held - set(plan.dropped_rows) | {admission.row for admission in plan.admissions}
        assert not held and bool(plans) == (method == "draft_target"), "what texts say costs nothing to try"
        assert llm.statistics()["num_rounds"] == 0
        assert tokens_of(llm.generate(prompts, SAMPLING)) == expected
        llm.check_idle()


def test_contexts_that_are_too_short_to_try_rounds_in_are_not_tried(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", max_position_embeddings=20)
    with make_llm(target, target, speculation={"draft_len": MOST, "pacing": "measured"}) as llm:
        pacer = llm.engine.orchestrator._pacer
        assert pacer is not None and pacer._costs is not None
        assert pacer._costs.seconds[1][0] > 1, "multiples of what reading the weights takes, not seconds"
        assert len(tokens_of(llm.generate([prompt_of(4)], [SamplingParams(max_tokens=8, ignore_eos=True)]))[0][0]) == 8
