"""Drafting ahead on a tiny engine: what was foreseen is what a drafter without guesses drafts after the same verdicts.

tests/helpers/ahead_rounds.py has the rounds and says what is compared in each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ahead_rounds import AheadRounds, FreshDrafts, load, make_drafter, plan_of, tokens_of, verdict_of
from checkpoints import make_checkpoint
from pipelines import prompt_of

from trtrun.core.nouns import FIRST_WARM_UP_ROUND, Verdict
from trtrun.models.decoder import CausalLM

GREEDY: list[dict[str, Any]] = [{}]
SAMPLED: list[dict[str, Any]] = [{"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20}, {}]
WITH_HISTORY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "frequency_penalty": 1.5, "min_p": 0.02},
    {"bad": ((5,), (3, 7))},
    {"logit_bias": {4: 6.0, 9: 5.0}, "presence_penalty": 1.0},
    {"temperature": 0.7, "stop_ids": (11, 12), "min_tokens": 12},
]
MIXED = [*GREEDY, *SAMPLED, *WITH_HISTORY]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load(make_checkpoint(tmp_path_factory.mktemp("ahead") / "draft", seed=3, num_hidden_layers=2))


def add_requests(rounds: AheadRounds, kinds: list[dict[str, Any]], count: int, most: int = 40) -> None:
    """Prompts of many lengths, every third of which begins like the one before."""
    prompt: list[int] = []
    for number in range(count):
        prompt = [*prompt[:-2], number] if number % 3 == 2 else prompt_of(3 + 7 * (number % 4), seed=number)
        rounds.add(prompt, max_tokens=most, **kinds[number % len(kinds)])


def assert_alike(rounds: AheadRounds) -> None:
    """All candidates were the fresh draft's, but for two that are as likely as each other to the last bit."""
    assert len(rounds.different) <= 1 + rounds.seen["places"] // 2000, rounds.different[:3]


@pytest.mark.parametrize(
    ("block_size", "draft_len", "use_logits", "kinds"),
    [
        (4, 5, False, GREEDY),
        (16, 1, True, GREEDY),
        (1, 2, False, SAMPLED),
        (4, 5, True, SAMPLED),
        (16, 1, False, WITH_HISTORY),
        (1, 2, False, WITH_HISTORY),
        (4, 5, True, WITH_HISTORY),
    ],
)
def test_what_was_foreseen_is_what_would_be_drafted_now(
    model: CausalLM, block_size: int, draft_len: int, use_logits: bool, kinds: list[dict[str, Any]]
) -> None:
    rounds = AheadRounds(model, seed=draft_len, block_size=block_size, draft_len=draft_len, use_logits=use_logits)
    add_requests(rounds, kinds, 5, most=30)
    rounds.run()
    assert rounds.seen["foreseen"] >= 10 and rounds.seen["missed"] > 3 and rounds.seen["redrafted"] > 3, rounds.seen
    assert rounds.seen["hit all"] and rounds.seen["hit none"], rounds.seen
    assert_alike(rounds)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_rows_come_and_go_and_are_preempted_between(model: CausalLM, seed: int) -> None:
    """On few blocks, beside prompts in chunks, with beginnings that were computed before."""
    rounds = AheadRounds(
        model, seed=seed, block_size=4, num_tokens=140, max_num_tokens=18, plans_ahead=seed % 2, use_logits=seed == 3
    )
    for _ in range(2):
        add_requests(rounds, MIXED, 9)
        rounds.run(cancels=0.05)
    wanted = ["preempted", "cached", "cancelled", "foreseen", "redrafted", "cut", "hit some"]
    wanted += ["goes on", "late", "late, and found", "found", "sat out"] if not rounds.use_logits else []
    assert all(rounds.seen[name] for name in wanted), rounds.seen
    assert rounds.scheduler.idle_is_whole()
    assert_alike(rounds)


@pytest.mark.parametrize(("seed", "window", "mask_token"), [(0, 6, None), (1, 17, None), (2, 9, 198)])
def test_layers_with_windows_hold_what_drafts_look_at(
    tmp_path: Path, seed: int, window: int, mask_token: int | None
) -> None:
    """Of rows that are sat out, that are guessed for, that begin with others' blocks; by places, of which there are
    too few for all."""
    more = {"sliding_window": window, "num_hidden_layers": 2}
    windowed = load(make_checkpoint(tmp_path / "draft", "MistralForCausalLM", seed=3, **more))
    rounds = AheadRounds(
        windowed, seed=seed, block_size=1, max_num_tokens=18, plans_ahead=seed % 2, mask_token=mask_token,
        rows_in_places=1 + seed % 2,
    )  # fmt: skip
    add_requests(rounds, MIXED, 9)
    rounds.run(copies=12)
    wanted = ["cached", "foreseen", "redrafted", "late", "late, and found", "sat out"]
    assert all(rounds.seen[name] for name in wanted), rounds.seen
    assert rounds.scheduler.idle_is_whole()
    assert_alike(rounds)


@pytest.mark.parametrize(("seed", "block_size", "use_logits"), [(0, 1, False), (1, 4, True), (2, 16, False)])
def test_drafts_that_came_with_requests_go_first_and_leave_nothing_wrong_behind(
    model: CausalLM, seed: int, block_size: int, use_logits: bool
) -> None:
    """Rows follow them for a while, or to their ends; what is drafted then is what a fresh drafter would draft."""
    rounds = AheadRounds(
        model, seed=seed, block_size=block_size, num_tokens=200, draft_len=2 + seed, use_logits=use_logits,
        plans_ahead=seed % 2,
    )  # fmt: skip
    for number in range(10):
        kind = {**MIXED[number % len(MIXED)], "draft_token_ids": prompt_of((40, 18, 40, 5, 0)[number % 5], seed=number)}
        rounds.add(prompt_of(3 + 7 * (number % 4), seed=number), max_tokens=30, **kind)
    rounds.run(cancels=0.02)
    assert rounds.seen["given"] > 10 and rounds.seen["foreseen"] > 5 and rounds.seen["redrafted"] > 3, rounds.seen
    assert rounds.scheduler.idle_is_whole()
    assert_alike(rounds)


@pytest.mark.parametrize(("max_seq_len", "draft_context"), [(60, 60), (60, 41)])
def test_rows_reach_the_end_of_a_context(model: CausalLM, max_seq_len: int, draft_context: int) -> None:
    """The target's, or the draft's before: from there on nothing is drafted."""
    rounds = AheadRounds(model, draft_len=5, max_seq_len=max_seq_len, draft_context=draft_context)
    add_requests(rounds, MIXED[:6], 6, most=100)
    rounds.run(always=True)
    assert {len(rounds._tokens[row]) for row in rounds._tokens} & set(range(max_seq_len, max_seq_len + 7))
    assert rounds.seen["foreseen"] > 20
    assert rounds.scheduler.idle_is_whole()


def test_the_last_positions_of_a_models_context_can_be_drafted(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "short", seed=3, num_hidden_layers=1, max_position_embeddings=48))
    rounds = AheadRounds(model, draft_len=4, max_seq_len=48, draft_context=48)
    for length in (20, 30, 40, 46):
        rounds.add(prompt_of(length, seed=length), max_tokens=100)
    rounds.run(always=True)
    assert rounds.seen["foreseen"] > 2
    assert rounds.drafter._engine.most_positions == 48


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_fresh_draft_is_greedy_or_sampled_like_that_of_one_device(model: CausalLM, use_logits: bool) -> None:
    """The drafter that everything here is compared with drafts what `DraftModelDrafter` does."""
    from trtrun.speculation.drafters.draft_model import DraftModelDrafter

    rounds = AheadRounds(model, use_logits=use_logits, plans_ahead=0, guesses=24)
    add_requests(rounds, MIXED[:4], 4)
    usual = make_drafter(model, 4, 101, 90, 3, use_logits, 0)
    drafter = DraftModelDrafter(usual._engine, model.config.vocab_size, use_logits)
    original = rounds.drafter.begin_round
    compared = 0

    def begin_round(plan: Any) -> None:
        nonlocal compared
        original(plan)
        drafter.begin_round(plan)
        rows = [row for row in plan.decode_rows.tolist()]
        found = drafter.propose(plan, [])
        if rows:
            fresh = rounds.fresh.drafts(rounds._admissions, {row: rounds._tokens[row] for row in rows})
            for row, tokens, length in zip(rows, found.tokens.tolist(), plan.draft_lens.tolist(), strict=True):
                assert tokens[:length] == fresh[row][0][:length]
                compared += length

    def observe(plan: Any, verdict: Verdict, step: None, original: Any = rounds.drafter.observe) -> None:
        original(plan, verdict, step)
        drafter.observe(plan, verdict, step)

    rounds.drafter.begin_round, rounds.drafter.observe = begin_round, observe  # type: ignore[method-assign]
    rounds.run(25, always=True)
    assert compared > 50


def test_guesses_are_of_the_planned_number_and_of_as_many_as_have_room(model: CausalLM) -> None:
    rounds = AheadRounds(model, guesses=8)
    add_requests(rounds, GREEDY, 3)
    rounds.run(6, always=True)
    drafter = rounds.drafter
    plan = plan_of(99, [0, 1, 2], [3, 3, 3], num_guesses=100)
    drafter.propose(plan, [])
    assert drafter.draft_ahead(plan, guesses=True) == len(drafter._guesses.listed) == 8
    assert {guess.row for guess in drafter._guesses.listed} == {0, 1, 2}
    assert drafter.draft_ahead(plan, guesses=False) == 0 and drafter._guesses.listed == []
    assert drafter.draft_ahead(plan_of(99, [0, 1, 2], [3, 3, 3], num_guesses=2), guesses=True) == 2


def test_a_row_that_failed_stays_where_it_is(model: CausalLM) -> None:
    rounds = AheadRounds(model)
    add_requests(rounds, GREEDY, 1)
    rounds.run(4, always=True)
    drafter, plan = rounds.drafter, plan_of(9, [0], [3], num_guesses=4)
    draft = tokens_of(drafter.propose(plan, []))
    drafter.draft_ahead(plan, guesses=True)
    drafter.observe(plan, verdict_of([[]]), None)
    assert tokens_of(drafter.propose(plan, [])) == draft


def test_warming_up_changes_nothing_of_rows(model: CausalLM) -> None:
    drafter = make_drafter(model, 4, 20, 40, 3, False, 8, guess_steps=(2, 8))
    store = next(drafter._engine._store.parts())[0]  # type: ignore[attr-defined]
    store.fill_(7.0)
    drafter.warm_up()
    assert (store[:, :, 1:] == 7.0).all()


def test_a_fresh_draft_does_not_depend_on_the_rows_beside_it(model: CausalLM) -> None:
    """What the comparisons of this file rest on."""
    rounds = AheadRounds(model)
    add_requests(rounds, MIXED, 4)
    rounds.run(6, always=True)
    tokens = {row: rounds._tokens[row] for row in range(4)}
    fresh = FreshDrafts(model, 90, 4, False)
    together = fresh.drafts(rounds._admissions, tokens)
    for row in range(4):
        assert fresh.drafts(rounds._admissions, {row: tokens[row]})[row][:2] == together[row][:2]


def test_a_guess_that_came_true_is_gone_after_a_round_of_prompts_alone(model: CausalLM) -> None:
    """The row was left out of that round, and no verdict belongs to it."""
    rounds = AheadRounds(model)
    add_requests(rounds, GREEDY, 2)
    rounds.run(4, always=True)
    drafter, plan = rounds.drafter, plan_of(9, [0], [3], num_guesses=8)
    draft = tokens_of(drafter.propose(plan, []))[0]
    drafter.draft_ahead(plan, guesses=True)
    row, count, token = next(iter(drafter._guesses._places))
    drafter.observe(plan, verdict_of([[*draft[:count], token]]), None)
    drafter.draft_ahead(plan_of(10, num_guesses=8), guesses=True)
    assert drafter.propose(plan_of(11, [row], [3]), []).cache_hits.tolist() == [0]


@pytest.mark.parametrize(("draft_len", "accepted"), [(3, 3), (3, 1)])
def test_verdicts_on_drafts_that_are_not_the_models_say_nothing_of_it(
    model: CausalLM, draft_len: int, accepted: int
) -> None:
    rounds = AheadRounds(model)
    given = prompt_of(20, seed=5)
    rounds.add(prompt_of(6, seed=1), max_tokens=40, draft_token_ids=given)
    rounds.run(1, always=True)
    drafter, plan = rounds.drafter, plan_of(9, [0], [draft_len], num_guesses=8, predicted_output_rows=(0,))
    drafter._put(0, given[:draft_len])
    drafter.draft_ahead(plan, guesses=True)
    before = drafter.hit_chances()
    following = drafter._texts[0].ranked[draft_len][0] if accepted == draft_len else given[accepted] + 1
    drafter.observe(plan, verdict_of([[*given[:accepted], following]]), None)
    assert drafter.hit_chances() == before


@pytest.mark.parametrize(("round_index", "learns"), [(9, True), (FIRST_WARM_UP_ROUND + 9, False)])
@pytest.mark.parametrize("num_guesses", [0, 8])
def test_what_is_accepted_says_how_likely_guesses_are_wherever_rows_are_real(
    model: CausalLM, num_guesses: int, round_index: int, learns: bool
) -> None:
    """Where nothing was guessed, too: else it would never be known that guesses would hit."""
    rounds = AheadRounds(model)
    add_requests(rounds, GREEDY, 1)
    rounds.run(4, always=True)
    drafter, plan = rounds.drafter, plan_of(round_index, [0], [3], num_guesses=num_guesses)
    (draft,) = tokens_of(drafter.propose(plan, []))
    drafter.draft_ahead(plan, guesses=True)
    before = drafter._candidate_budget.chances(3)
    drafter.observe(plan, verdict_of([[*draft, 5]]), None)
    after = drafter._candidate_budget.chances(3)
    assert (after[3] > before[3]) == learns and (after == before) == (not learns)
