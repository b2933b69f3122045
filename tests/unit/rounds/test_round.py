"""Whole rounds in one process, without a model: the worker's part, and the orchestrator's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine, Rule, own_link

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Request, RoundPlan, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.rounds.commit import commit_round
from trtrun.rounds.exchange.exchange import DeviceExchange
from trtrun.rounds.round import Worker, probability_rows
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.acceptance import AcceptanceWatch
from trtrun.speculation.drafters.draft_model import DraftModelDrafter
from trtrun.speculation.pacing import Pacer
from trtrun.wire.reports import RoundReport, RoundTimes

VOCAB = 31


def target_rule(context: Sequence[int]) -> int:
    return (3 * context[-1] + 5 * len(context) + sum(context[-4:])) % VOCAB


def wrong_every(number: int) -> Rule:
    """A draft that is wrong at every `number`-th position."""
    return lambda context: (target_rule(context) + (len(context) % number == 0)) % VOCAB


def never_right(context: Sequence[int]) -> int:
    return (target_rule(context) + 1) % VOCAB


def continue_alone(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target_rule(tokens))
    return tokens[len(prompt) :]


class Cycle:
    """Scheduler, two fake engines and a link: `run` takes rounds until all requests are done.

    `pace` is the most tokens to draft in each plan, without end, and the rows that they are drafted for where it is a
    pair; None leaves it at draft_len.
    """

    def __init__(
        self,
        draft_rule: Rule,
        draft_len: int,
        use_logits: bool = False,
        plans_ahead: int = 0,
        pace: Iterator[int | tuple[int, int | None]] | None = None,
        max_rows: int = 4,
        drafts_pay: bool = True,
        options: HybridOptions | None = None,
        rule: Rule = target_rule,
    ) -> None:
        self.pace = pace
        self.drafts_pay = drafts_pay
        self.drafted: dict[int, int] = {}
        self.draft = FakeEngine(draft_rule, VOCAB, max_rows)
        self.target = FakeEngine(rule, VOCAB, max_rows)
        self.worker = Worker(
            DeviceExchange(
                own_link(),
                in_place=False,
                leads_draft=True,
                target_vocab_size=VOCAB,
                looks_texts_up=options is not None,
            ),
            DraftModelDrafter(self.draft, VOCAB, use_logits, options),
            self.target,
            leads_draft=True,
            leads_target=True,
            use_logits=use_logits,
        )
        self.plans_ahead = plans_ahead
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_rows, 64, 200, 200, draft_len, 16, 64 * max_rows, enable_block_reuse=False, plans_ahead=plans_ahead
            )
        )
        self.outputs: dict[int, list[int]] = {}
        self.rounds = 0
        self.plans: list[RoundPlan] = []

    def add(self, request_id: int, prompt: Sequence[int], **sampling: Any) -> None:
        self.outputs[request_id] = []
        self.scheduler.add(Request(request_id, tuple(prompt), SamplingParams(seed=request_id, **sampling)))

    def round(self, plan: RoundPlan) -> None:
        report = self.worker.launch_round(plan).finish()
        assert report is not None
        for result in commit_round(self.scheduler, plan, report.unpack()):
            number = result.completion.request.request_id
            self.outputs[number] += result.new_token_ids
            self.drafted[number] = result.completion.statistics.num_draft_tokens
        self.rounds += 1

    def _schedule(self) -> RoundPlan | None:
        asked = next(self.pace) if self.pace is not None else None
        draft_len, most_drafting = asked if isinstance(asked, tuple) else (asked, None)
        plan = self.scheduler.schedule(draft_len, most_drafting=most_drafting, drafts_pay=self.drafts_pay)
        self.plans += [] if plan is None else [plan]
        return plan

    def run(self) -> None:
        waiting: list[RoundPlan] = []
        while self.scheduler.has_work:
            while len(waiting) <= self.plans_ahead and (plan := self._schedule()) is not None:
                waiting.append(plan)
            self.round(waiting.pop(0))
        for plan in waiting:  # made before the last request ended; its result belongs to nobody
            self.round(plan)


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("draft_rule", [target_rule, never_right, wrong_every(2), wrong_every(5)])
def test_greedy_output_is_the_targets_own(draft_rule: Rule, draft_len: int, plans_ahead: int) -> None:
    cycle = Cycle(draft_rule, draft_len, plans_ahead=plans_ahead)
    prompts = {1: [4], 2: [7, 8, 9], 3: list(range(25)), 4: [1, 1], 5: [2] * 40, 6: [30]}
    for request_id, prompt in prompts.items():
        cycle.add(request_id, prompt, max_tokens=10 + request_id)
    cycle.run()
    assert cycle.outputs == {number: continue_alone(prompt, 10 + number) for number, prompt in prompts.items()}
    cycle.scheduler.idle_is_whole()


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize(
    "lens", [[0], [0, 4], [4, 0, 0], [3] + [0] * 5, [4] + [0] * 6, [4, 1] + [0] * 7, [2] + [0] * 20]
)
@pytest.mark.parametrize("draft_rule", [target_rule, wrong_every(3)])
def test_the_draft_catches_up_after_rounds_that_it_sat_out(draft_rule: Rule, lens: list[int], plans_ahead: int) -> None:
    """A hole in its context would raise; and it drafts as well as before."""
    cycle = Cycle(draft_rule, 4, plans_ahead=plans_ahead, pace=itertools.cycle(lens))
    prompts = {1: [4], 2: [7, 8, 9], 3: list(range(25)), 4: [1, 1], 5: [2] * 40, 6: [30]}
    for request_id, prompt in prompts.items():
        cycle.add(request_id, prompt, max_tokens=60 + 5 * request_id)
    cycle.run()
    assert cycle.outputs == {number: continue_alone(prompt, 60 + 5 * number) for number, prompt in prompts.items()}
    cycle.scheduler.idle_is_whole()


@pytest.mark.parametrize(
    ("num_rows", "in_rounds", "times"), [(1, 127, 1), (4, 127, 1), (5, 31, 3), (16, 31, 3), (17, 7, 3), (20, 7, 3)]
)
def test_without_drafts_the_draft_engine_runs_in_few_rounds(num_rows: int, in_rounds: int, times: int) -> None:
    cycle = Cycle(target_rule, 4, pace=itertools.repeat(0), max_rows=20)
    for number in range(num_rows):
        cycle.add(number, [3, 4], max_tokens=1 + times * in_rounds)
    cycle.run()
    assert cycle.rounds == 1 + times * in_rounds
    assert cycle.draft.forwards == 1 + times


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_where_some_rows_draft_the_draft_engine_leaves_the_others_out(plans_ahead: int) -> None:
    """They are fed what they lack when they draft, and draft as well as the others."""
    some = itertools.chain([(3, 2)] * 20, itertools.repeat((3, None)))
    cycle = Cycle(target_rule, 3, pace=some, max_rows=4, plans_ahead=plans_ahead)
    for number in range(4):
        cycle.add(number, [3, 4 + number], max_tokens=60 if number > 1 else 160)
    cycle.run()
    for number in range(4):
        assert cycle.outputs[number] == continue_alone([3, 4 + number], 60 if number > 1 else 160)
    apart = [plan for plan in cycle.plans if len(plan.decode_rows) == 4 and plan.draft_lens.tolist().count(3) == 2]
    assert len(apart) >= 10
    assert all((plan.catch_up > 0).tolist() == (plan.draft_lens > 0).tolist() for plan in apart)
    assert all(min(plan.catch_up.tolist()) > 0 for plan in cycle.plans if plan.draft_lens.tolist().count(3) == 4)
    assert min(cycle.drafted.values()) > 20


def test_where_drafts_do_not_pay_the_draft_engine_feeds_no_rows_and_follows_one_in_sixteen() -> None:
    """Texts stay what they are, and a row that is followed is drafted for as well as ever."""
    cycle = Cycle(target_rule, 4, pace=itertools.chain([0] * 40, itertools.repeat(4)), drafts_pay=False)
    cycle.add(1, [3, 4], max_tokens=60)
    for number in range(2, 40):
        cycle.add(number, [number], max_tokens=20)
    cycle.run()
    assert cycle.outputs[1] == continue_alone([3, 4], 60)
    assert all(cycle.outputs[number] == continue_alone([number], 20) for number in range(2, 40))
    drafted = {number for number, count in cycle.drafted.items() if count}
    assert drafted == {16, 32}, "and not the first row, which it would have had to feed"
    cycle.scheduler.idle_is_whole()


def test_a_perfect_draft_yields_draft_len_plus_one_tokens_a_round() -> None:
    cycle = Cycle(target_rule, draft_len=4)
    cycle.add(1, [3, 4], max_tokens=51)
    cycle.run()
    assert cycle.rounds == 1 + 10  # prefill with the first token, then 5 tokens a round
    # 1 prefill; each round one catch-up, which fills the bonus hole, and 3 more steps
    assert cycle.draft.forwards == 1 + 10 * 4
    assert cycle.target.forwards == 11


def test_a_useless_draft_costs_rounds_and_nothing_else() -> None:
    cycle = Cycle(never_right, draft_len=4)
    cycle.add(1, [3, 4], max_tokens=20)
    cycle.run()
    assert cycle.outputs[1] == continue_alone([3, 4], 20)
    assert cycle.rounds == 20


def test_probabilities_travel_for_sampled_rows_only() -> None:
    cycle = Cycle(wrong_every(3), draft_len=3, use_logits=True)
    cycle.add(1, [3, 4], max_tokens=20)
    cycle.add(2, [3, 4], max_tokens=20, temperature=1e-3)  # so cold that the rule's token is certain
    cycle.run()
    assert cycle.outputs == {1: continue_alone([3, 4], 20), 2: continue_alone([3, 4], 20)}
    rows, lens = np.array([0, 1], np.int32), np.array([3, 3], np.int32)
    plan = RoundPlan(0, (), (), np.zeros((0, 3), np.int32), (), rows, lens, lens, 9)
    assert probability_rows(plan, _Greedy({0})) == [1]
    for use_logits, expected in {True: [0, 1], False: []}.items():
        other = Cycle(target_rule, draft_len=3, use_logits=use_logits)
        other.target.rows.sampling = _Greedy(set())
        assert other.worker._begin(plan) == expected


class _Greedy:
    def __init__(self, greedy: set[int]) -> None:
        self._greedy = greedy

    def sampled_indices(self, rows: list[int]) -> list[int]:
        return [index for index, row in enumerate(rows) if row not in self._greedy]

    def begin_round(self, timed_rows: Sequence[int]) -> None: ...


def test_a_report_of_another_round_is_a_defect_that_is_seen() -> None:
    cycle = Cycle(target_rule, draft_len=2)
    cycle.add(1, [3], max_tokens=4)
    plan = cycle.scheduler.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match="round 99"):
        commit_round(cycle.scheduler, plan, RoundReport(99, RoundTimes(), True, [1], [0], [[2]], []))


@pytest.mark.parametrize("speculating", [False, True])
def test_pacing_counts_a_draft_that_was_not_found_as_rejected_and_nothing_while_speculation_is_off(
    speculating: bool,
) -> None:
    """The round was as wide as with a draft, so what drafting pays is less by every one that was not there."""
    scheduler, pacer = Scheduler(SchedulerLimits(1, 64, 100, None, 3, 16, 16)), Pacer(3)
    scheduler.set_speculation(speculating)
    running = scheduler.add(Request(1, (1, 2), SamplingParams(seed=1, max_tokens=20)))
    before = pacer.expected_tokens(3)
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        report = RoundReport(plan.round_index, RoundTimes(), True, [1], [0], [[5]], [])
        commit_round(scheduler, plan, report, pacer, 0.1)
    assert (pacer.expected_tokens(3) < before) == speculating
    assert running.statistics.num_draft_tokens == 0


def test_what_is_said_of_drafts_counts_those_that_were_verified_as_statistics_do() -> None:
    """Drafts that were asked for and not found are no wrong ones."""
    scheduler, watch = Scheduler(SchedulerLimits(1, 64, 100, None, 3, 16, 16)), AcceptanceWatch(3, "see the oracle")
    running = scheduler.add(Request(1, (1, 2), SamplingParams(seed=1, max_tokens=90)))
    for number in range(18):
        plan = scheduler.schedule()
        assert plan is not None
        found = 2 * (number > 0)
        report = RoundReport(plan.round_index, RoundTimes(), True, [found + 1], [found], [[5] * (found + 1)], [])
        commit_round(scheduler, plan, report, watch=watch)
        plan = scheduler.schedule()
        assert plan is not None
        report = RoundReport(plan.round_index, RoundTimes(), True, [1], [0], [[5]], [])
        commit_round(scheduler, plan, report, watch=watch)
    assert running.statistics.num_draft_tokens == running.statistics.num_accepted_draft_tokens == 2 * 17
    said = watch.complain(False)
    assert said is not None and "100% of 17, 100% of 17; that is often" in said


def test_the_draft_proposes_no_id_that_only_its_padding_has() -> None:
    wide = FakeEngine(lambda context: 40, vocab_size=48)
    drafter = DraftModelDrafter(wide, target_vocab_size=VOCAB, use_logits=True)
    scheduler = Scheduler(SchedulerLimits(1, 64, 100, 100, 3, 16, 16))
    scheduler.add(Request(1, (1, 2), SamplingParams(seed=1, temperature=1.0, max_tokens=9)))
    first, rows = scheduler.schedule(), torch.zeros(1, dtype=torch.int64)
    assert first is not None
    drafter.begin_round(first)
    drafter.propose(first, [])
    drafter.observe(first, Verdict(rows + 1, rows.unsqueeze(1) + 5), None)
    scheduler.commit(first, [1], [[5]])
    second = scheduler.schedule()
    assert second is not None
    drafter.begin_round(second)
    draft = drafter.propose(second, [0])
    assert draft.draft_probs is not None and draft.draft_probs.shape == (1, 3, VOCAB)
    assert int(draft.tokens.max()) < VOCAB
    assert torch.allclose(draft.draft_probs.sum(-1), torch.ones(1, 3))


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("use_logits", [False, True])
@pytest.mark.parametrize("pace", [None, 0])
@pytest.mark.parametrize("right", [0, 1, 7, 20])
def test_a_draft_that_came_with_a_request_goes_first_and_the_model_goes_on(
    right: int, pace: int | None, use_logits: bool, plans_ahead: int
) -> None:
    """The draft's store never has other tokens than the row: the fake engines look. Pacing holds nothing of it back."""
    cycle = Cycle(never_right, 4, use_logits, plans_ahead, pace=itertools.repeat(pace) if pace is not None else None)
    prompts = {1: [4], 2: [7, 8, 9], 3: list(range(25))}
    for request_id, prompt in prompts.items():
        given = continue_alone(prompt, 20)
        given[right:] = [(token + 1) % VOCAB for token in given[right:]]
        cycle.add(request_id, prompt, max_tokens=21, draft_token_ids=given if request_id != 2 else ())
    states = dict(cycle.scheduler._requests)
    cycle.run()
    for request_id, prompt in prompts.items():
        assert cycle.outputs[request_id] == continue_alone(prompt, 21)
        statistics = states[request_id].statistics
        # The first token is the prompt's; the others come four and one at a time as long as the draft is right.
        assert statistics.num_accepted_draft_tokens == (max(0, right - 1 - (right - 1) // 5) if request_id != 2 else 0)
        if right == 20 and request_id != 2:
            assert statistics.num_rounds == 4 and statistics.acceptance_histogram == [0, 0, 0, 0, 4]


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("min_match", [1, 6])
@pytest.mark.parametrize("late", [True, False])
def test_what_stood_before_goes_first_and_is_fed_at_once(late: bool, min_match: int, plans_ahead: int) -> None:
    """Two rows repeat themselves soon, and one late where there is one; the draft is never right. Its store has the
    rows' tokens alone, and no hole."""

    def seven(context: Sequence[int]) -> int:
        return (context[-1] + 1) % (7 if context[0] < 7 and len(context) < 24 else VOCAB)

    options = HybridOptions(enable_suffix_decoding=True, suffix_decoding_min_match_len=min_match)
    cycle = Cycle(lambda context: (seven(context) + 2) % VOCAB, 4, plans_ahead=plans_ahead, options=options, rule=seven)
    prompts = {1: [4], 2: [3, 4, 5], **({3: [9]} if late else {})}
    for request_id, prompt in prompts.items():
        cycle.add(request_id, prompt, max_tokens=40)
    states = dict(cycle.scheduler._requests)
    cycle.run()
    for request_id, prompt in prompts.items():
        expected = list(prompt)
        while len(expected) < len(prompt) + 40:
            expected.append(seven(expected))
        assert cycle.outputs[request_id] == expected[len(prompt) :]
        statistics = states[request_id].statistics
        accepted = statistics.num_accepted_suffix_draft_tokens
        assert accepted == statistics.num_accepted_draft_tokens, "the model is never right"
        assert accepted <= statistics.num_suffix_draft_tokens < statistics.num_draft_tokens
        # Behind seven tokens, and as many more as must match, four of five are drafted until the text goes on anew.
        assert accepted >= (24 - 7 - min_match) * 4 // 5 - 3 or request_id == 3


def test_the_pacer_is_not_told_of_drafts_that_came_with_requests() -> None:
    scheduler = Scheduler(SchedulerLimits(4, 64, 200, 200, 4, 16, 64, enable_block_reuse=False))
    told: list[tuple[float | None, list[tuple[int, int]]]] = []

    class Noting(Pacer):
        def record(self, num_rows: int, draft_len: int, seconds: Any, acceptances: Any, *others: Any) -> None:
            told.append((seconds, acceptances))

    def round_of(*tokens: list[int]) -> None:
        plan = scheduler.schedule(2)
        assert plan is not None
        lens = [*plan.draft_lens.tolist(), *[0] * (len(tokens) - len(plan.draft_lens))]
        report = RoundReport(plan.round_index, RoundTimes(), True, list(map(len, tokens)), lens, list(tokens), [])
        commit_round(scheduler, plan, report, Noting(4), 0.5)

    scheduler.add(Request(1, (3,), SamplingParams(seed=1, draft_token_ids=(5, 6, 7, 8, 9, 10, 11, 12))))
    scheduler.add(Request(2, (3,), SamplingParams(seed=1)))
    round_of([5], [5])
    round_of([6, 7, 8, 9, 10], [1])
    round_of([12, 1], [1, 1])
    round_of([1], [1])
    assert told == [(None, [(2, 0)]), (None, [(2, 1)]), (0.5, [(2, 0), (2, 0)])]
