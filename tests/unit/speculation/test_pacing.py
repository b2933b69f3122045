"""Pacing: the draft_len that the run's own times and acceptances, and those of the start, say pays most."""

from __future__ import annotations

import random
import statistics

import pytest
from pacing_machine import MOST, Machine

from trtrun.speculation.acceptance import DraftRecord
from trtrun.speculation.pacing import Pacer
from trtrun.speculation.round_costs import RoundCosts


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


MACHINES = {
    "half as heavy": (9.0, 18.0, 0.9),
    "heavy draft": (2.5, 18.0, 0.9),
    "GPU": (0.6, 4.2, 0.02),
    "light draft": (0.2, 2.2, 0.01),
}
"""Milliseconds of a drafted token, of the weights, and of a position."""


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", MACHINES)
def test_a_draft_that_is_never_right_costs_a_fiftieth_of_the_first_text_at_most(kind: str, num_rows: int) -> None:
    """Nothing was known before, and a plan is out when a verdict comes."""
    for seed in range(5):
        machine = Machine(0.0, *MACHINES[kind], noise=0.0, generator=random.Random(seed))
        pacer = Pacer(MOST, machine.costs())
        plain = 64 * machine.cost(num_rows, 0)
        assert plain / machine.text(pacer, num_rows, 64) > 0.98
        assert plain / machine.text(pacer, num_rows, 64) > 0.97, "later ones try drafts again"


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("kind", [kind for kind in MACHINES if kind != "half as heavy"])
def test_the_first_text_is_about_as_fast_as_later_ones_and_those_as_the_best_draft_len(
    kind: str, acceptance: float
) -> None:
    """Means of many processes, as texts of 128 tokens differ by chance; with what an earlier one has seen, too."""
    for share, is_known in ((0.93, False), (0.96, True)):
        first = later = best = 0.0
        for seed in range(12):
            machine = Machine(acceptance, *MACHINES[kind], generator=random.Random(seed))
            pacer, record = Pacer(MOST, machine.costs()), None
            if is_known:
                for _ in range(4):
                    machine.text(pacer, 1, 128)
                record = pacer.seen
            pacer = Pacer(MOST, machine.costs(), record)
            first += machine.text(pacer, 1, 128)
            later += sum(machine.text(pacer, 1, 128) for _ in range(5)) / 5
            best += min(machine.fixed_text(1, 128, draft_len) for draft_len in range(MOST + 1))
        assert later / first > share and best / later > 0.93, (later / first, best / later)


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("kind", ["GPU", "light draft"])
def test_drafts_that_become_bad_are_left_at_once_and_those_that_become_good_are_found(kind: str, num_rows: int) -> None:
    machine = Machine(0.9, *MACHINES[kind])
    pacer = Pacer(MOST, machine.costs())
    machine.text(pacer, num_rows, 512)
    machine.acceptance = 0.0
    assert machine.fixed_text(num_rows, 512, 0) / machine.text(pacer, num_rows, 512) > 0.96
    machine.acceptance = 0.9
    best = min(machine.fixed_text(num_rows, 512, draft_len) for draft_len in range(MOST + 1))
    assert best / machine.text(pacer, num_rows, 512) > 0.6
    assert best / machine.text(pacer, num_rows, 512) > 0.9


def test_a_run_begins_with_what_an_earlier_one_has_seen() -> None:
    """A good draft begins with its length, a bad one with none, and no prompt is read for it."""
    machine = Machine(0.9)
    pacer = Pacer(MOST, machine.costs())
    machine.run(pacer, 1, 60)
    again = Pacer(MOST, machine.costs(), pacer.seen)
    assert again.choose(1) >= MOST - 1 and not again.is_unsure
    assert pacer.seen_costs is None, "rounds of one length say nothing of others"
    machine.acceptance = 0.0
    pacer = Pacer(MOST, Machine(0.0, weights_ms=9.0).costs())
    machine.run(pacer, 4, 200)
    costs = pacer.seen_costs
    assert costs is not None and costs.estimate(4, 1) == pytest.approx(machine.cost(4, 1) / 1e3, rel=0.3)
    machine.run(pacer, 64, 60)
    again = Pacer(MOST, machine.costs(), pacer.seen)
    assert again.choose(64) == 0 and not again.pays
    assert machine.share_of_good(64, machine.run(again, 64, 64)) == 1.0


def test_what_is_kept_of_another_draft_len_counts_as_far_as_it_goes() -> None:
    pacer = Pacer(3, None, DraftRecord((200.0, 100.0), (100.0, 100.0), 1.0, True))
    assert pacer.seen.offered == (32.0, 16.0, 0.0) and pacer.seen.accepted == (16.0, 16.0, 0.0)
    assert Pacer(1, None, DraftRecord((0.0, 0.0), (0.0, 0.0), 1.0, True)).is_unsure


@pytest.mark.parametrize("slow_rounds", [0, 5])
def test_rounds_without_a_draft_are_seen_where_the_start_found_drafts_worth_it(slow_rounds: int) -> None:
    """And some that were slow by chance, the last ones that were seen, do not speak for all of them."""
    real = {0: 2.6e-3, 1: 5.6e-3, 2: 7.1e-3, 3: 8.6e-3, 4: 10.0e-3, 5: 11.5e-3}
    pacer = Pacer(MOST, RoundCosts({4: {0: 3.15e-3, 1: 4.4e-3, MOST: 9.0e-3}}))
    chances = random.Random(5)
    pacer._acceptance.offered, pacer._acceptance.accepted = [50.0] * MOST, [40.0] * MOST  # what other loads have shown
    assert pacer.choose(4) > 0
    for number in range(80):
        length = pacer.choose(4)
        kept = next((place for place in range(length) if chances.random() > 0.8), length)
        late = not length and 40 <= number < 40 + slow_rounds
        pacer.record(4, length, 2 * real[length] if late else real[length], [(length, kept)] if length else [])
    assert pacer.choose(4) == 0


def test_after_many_rounds_without_a_draft_none_are_expected_to_pay() -> None:
    """But for trials; rounds that nothing could be drafted in say nothing, and one that was drafted in says more."""
    machine = Machine(0.0)
    pacer = Pacer(MOST, machine.costs())
    machine.run(pacer, 1, 40)
    assert pacer.pays
    for _ in range(400):
        pacer.record(1, 0, 0.01, (), num_plain=1)
    assert pacer.pays
    machine.run(pacer, 1, 200)
    assert not pacer.pays
    pacer.record(1, 0, 0.01, (), num_plain=1)
    assert not pacer.pays
    Machine(1.0).run(pacer, 1, 400)
    assert pacer.pays


def test_where_many_drafts_were_never_right_few_rounds_are_enough() -> None:
    machine = Machine(0.0)
    pacer = Pacer(MOST, machine.costs())
    machine.run(pacer, 64, 12)
    assert not pacer.pays
    good = Pacer(MOST, machine.costs())
    Machine(0.9).run(good, 128, 12)  # which do not pay with so many rows, and may with fewer
    assert good.pays


def test_plans_that_were_out_when_a_trial_ended_do_not_say_that_drafts_pay() -> None:
    """A verdict comes when the next plan is out: what it says is known a round later."""
    machine = Machine(0.0)
    pacer = Pacer(MOST, machine.costs())
    out, chosen = pacer.choose(1), []
    for _ in range(300):
        pacer.note_plan(1, 0, out, int(out > 0))
        draft_len, out = out, pacer.choose(1)
        chosen.append(draft_len)
        pacer.record(1, draft_len, machine.cost(1, draft_len) / 1e3, [(draft_len, 0)] if draft_len else [])
    assert any(chosen[64:]), "no trial"
    assert not pacer.pays


def test_asking_without_a_plan_uses_up_no_draft() -> None:
    """Where nothing can be planned the pacer is asked again; what is out and what was verified count once."""
    pacer = Pacer(MOST, RoundCosts({1: {0: 0.02, 1: 0.024, MOST: 0.1}}))
    assert [pacer.choose(1) for _ in range(9)] == [1] * 9
    for _ in range(4):
        pacer.note_plan(1, 0, 1, 1)
    pacer.record(1, 1, 0.024, [(1, 0)])
    assert pacer.choose(1) == 0


@pytest.mark.parametrize(("num_rows", "most"), [(4, None), (8, None), (64, 8), (128, 8)])
def test_how_often_drafts_are_right_is_learned_of_a_few_rows(num_rows: int, most: int | None) -> None:
    """At first, and where none should be drafted; where drafts pay all rows draft."""
    machine = Machine(1.0, position_ms=0.0)
    pacer = Pacer(MOST, machine.costs())
    assert pacer.choose(num_rows) > 0 and pacer.most_drafting(num_rows) == most
    assert statistics.median(machine.run(pacer, num_rows, 60)) >= 2
    assert pacer.most_drafting(num_rows) is None
    Machine(0.0).run(pacer, num_rows, 100)
    assert (pacer.choose(num_rows), pacer.most_drafting(num_rows)) == (0, most)


def test_costs_that_the_start_measured_are_corrected_by_rounds() -> None:
    """The start found verifying cheap, and it is not: contexts are long, say."""
    cheap, machine = Machine(0.8, position_ms=0.0), Machine(0.8)
    pacer = Pacer(MOST, cheap.costs())
    cheap.run(pacer, 16, 5)
    assert pacer.choose(16) > 1
    assert machine.share_of_good(16, machine.run(pacer, 16, 500)[100:]) > 0.93


def test_rounds_of_far_more_rows_than_were_measured_are_learned_on_the_way() -> None:
    machine = Machine(0.0)
    costs = RoundCosts({1: {0: 0.02, 1: 0.03, MOST: 0.05}})
    pacer = Pacer(MOST, costs)
    assert pacer.choose(64) > 2
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
        pacer.record(1, MOST, 1.0 + MOST, [(MOST, 3)])
    # Every draft token costs as much as a token of the target: none can pay, and one at most is worth a trial.
    assert pacer.choose(1) <= 1


def test_rounds_without_a_time_teach_acceptance_only() -> None:
    pacer = Pacer(MOST)
    for _ in range(300):
        pacer.record(4, MOST, None, [(MOST, 0)] * 4)
    assert pacer.choose(4) == MOST
    assert pacer.expected_tokens(MOST) < 1.1


def test_a_load_that_is_new_begins_as_the_nearest_one_does() -> None:
    pacer = Pacer(4)
    pacer.record(1, 4, 0.1, [(4, 4)])
    for _ in range(300):
        draft_len = pacer.choose(32)
        pacer.record(32, draft_len, 0.1 * (1 + 10 * draft_len), [(draft_len, 0)] * 32 if draft_len else [])
    assert (pacer.choose(28), pacer.choose(2)) == (0, 4)
